"""MkDocs hook: pictures in bench/results/ belong to the site, under the relative paths that work on GitHub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"


def on_files(files: Files, config: Any) -> Files:
    for picture in sorted(path for path in RESULTS.iterdir() if path.suffix in (".svg", ".png")):
        files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    to_root = "../" * page.file.src_uri.count("/")
    return re.sub(r"\]\((?:\.\./)+bench/results/", f"]({to_root}pictures/", markdown)
