"""Where the program `attn-zoo` starts; `python -m attn_zoo` is it too, for machines where it is not installed."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line; Ctrl-C is one line and an exit code from here on, while all of it is loaded too."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell wants it to be ignored
        signal.signal(signal.SIGINT, _interrupt)
    from attn_zoo import cli

    cli.main()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`; while much is being loaded, end at once: C++ that imports there drops exceptions."""
    if _is_loading("attn_zoo.cli") or ("torch" in sys.modules and _is_loading("torch")):
        if sys.stderr is not None:  # None where it is closed
            sys.stderr.write("interrupted\n")
        os._exit(130)
    signal.default_int_handler(number, frame)


def _is_loading(name: str) -> bool:
    """Tell whether a module is not there yet or not whole."""
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", name not in sys.modules)


if __name__ == "__main__":
    main()
