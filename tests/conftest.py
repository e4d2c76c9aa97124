"""What all tests share: how long a random example may take says something about the machine, not about the code."""

import os
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

# Examples that failed are kept in the checkout, where that can be written.
_place: dict[str, Any] = {} if os.access(Path.cwd(), os.W_OK) else {"database": None}
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], **_place)
settings.load_profile("any machine")
