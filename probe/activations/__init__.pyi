from .collect import require_finite as require_finite
from .table import sites as sites
from .table import with_titles as with_titles
