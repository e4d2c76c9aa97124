"""`python -m attn_zoo` is `attn-zoo`, for machines where the package is not installed."""

from attn_zoo.cli import main

main()
