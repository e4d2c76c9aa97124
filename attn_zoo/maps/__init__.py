"""Maps: what a trained model's heads look at, what its positions are, how its learning rate moves.

Weights come from `attn_zoo.attention.effective`, which watches any mechanism from outside; models from the weights that
a run keeps (`keep_weights = true`). Figures look like those of reports.
"""

from attn_zoo.maps.attention import attention_map
from attn_zoo.maps.position_table import position_map
from attn_zoo.maps.rate_curve import schedule_map
from attn_zoo.report.figures.svg import save_figure

__all__ = ["attention_map", "position_map", "save_figure", "schedule_map"]
