"""python -m fp8attn: print `fp8attn.info()`."""

import io
import sys

from . import info


def main() -> None:
    """Print it, a line each, in whatever encoding standard output has."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    lines = info()
    width = max(map(len, lines))
    for name, text in lines.items():
        print(f"{name:<{width}}  {text}")


if __name__ == "__main__":
    main()
