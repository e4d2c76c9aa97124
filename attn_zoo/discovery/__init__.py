"""Find and import variants and tasks: modules of this package, entry points of other packages, plain files."""

from attn_zoo.discovery.import_trial import IMPORT_TIMEOUT_S, as_trial, ask_python, importable, is_trial
from attn_zoo.discovery.plain_files import import_file, plain_file_at_work
from attn_zoo.discovery.providers import LoadFailure, discover, is_offered, tried_imports

__all__ = [
    "IMPORT_TIMEOUT_S",
    "LoadFailure",
    "as_trial",
    "ask_python",
    "discover",
    "import_file",
    "importable",
    "is_offered",
    "is_trial",
    "plain_file_at_work",
    "tried_imports",
]
