from .activations.collect import collect as collect
from .activations.table import sites as sites
from .causal.directions import ablate_direction as ablate_direction
from .causal.directions import interchange as interchange
from .causal.division import division_test as division_test
from .causal.division import residual_division_test as residual_division_test
from .causal.divisors import divisors as divisors
from .causal.gain import gain_curve as gain_curve
from .causal.ledger import division_ledger as division_ledger
from .causal.norm_scale import norm_statistics as norm_statistics
from .causal.patching import ablate as ablate
from .causal.pivots import pivot_label as pivot_label
from .causal.pivots import pivot_test as pivot_test
from .matching.alignment import Alignment as Alignment
from .matching.alignment import align as align
from .probing.linear import fit_probes as fit_probes
from .probing.readout import read_out as read_out
from .subjects.subject import Subject as Subject
from .subjects.subject import load_subject as load_subject
from .symmetry.count import symmetry_count as symmetry_count
from .verdict.verdict import Verdict as Verdict
from .verdict.verdict import identify as identify

__version__: str
