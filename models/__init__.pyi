from .architecture.config import ModelConfig as ModelConfig
from .architecture.sites import Site as Site
from .architecture.sites import Studied as Studied
from .architecture.transformer import LinearAttentionTransformer as LinearAttentionTransformer
from .checkpoint import CheckpointError as CheckpointError
from .checkpoint import available as available
from .checkpoint import from_paper_weights as from_paper_weights
from .checkpoint import load as load
from .checkpoint import save as save
from .checkpoint import training_prompts as training_prompts
from .constructed.basis import coordinate_names as coordinate_names
from .constructed.cramer import determinant_form as determinant_form
from .constructed.cramer import fraction_free_form as fraction_free_form
from .constructed.descent import gradient_descent as gradient_descent
from .constructed.elimination import closed_form as closed_form
from .constructed.published import from_ahn as from_ahn
from .constructed.published import from_von_oswald as from_von_oswald
from .constructed.published import from_zhang as from_zhang
from .tasks.config import PromptConfig as PromptConfig
from .tasks.linear_regression import Prompts as Prompts
from .tasks.linear_regression import prompts_from_arrays as prompts_from_arrays
from .tasks.linear_regression import sample_prompts as sample_prompts
from .training.config import TrainConfig as TrainConfig
from .training.grid import train as train

__version__: str
