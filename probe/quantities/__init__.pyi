from .dictionary import EliminationSteps as EliminationSteps
from .dictionary import Quantities as Quantities
from .dictionary import added_quantities as added_quantities
from .dictionary import stream_quantities as stream_quantities
from .residuals import residual_quantities as residual_quantities
from .statistics import chosen_statistics as chosen_statistics
from .statistics import statistic_label as statistic_label
from .statistics import statistic_values as statistic_values
