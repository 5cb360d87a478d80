"""python -m fp8attn: print `fp8attn.info()`."""

from . import info


def main() -> None:
    lines = info()
    width = max(map(len, lines))
    for name, text in lines.items():
        print(f"{name:<{width}}  {text}")


main()
