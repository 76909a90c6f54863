from models import LinearAttentionTransformer, ModelConfig, PromptConfig
from probe.report.words import model_in_words, prompts_in_words


def test_every_setting_of_the_prompts_is_said():
    plain = PromptConfig(n_context=40, n_covariates=2)
    assert prompts_in_words(plain) == (
        "40 samples of 2 covariates, x ~ N(0, 1), unscaled, unshifted; noise 0.1 on y"
    )
    changes = {
        "n_context": 41,
        "n_covariates": 3,
        "noise_std": 0.2,
        "x_mean_std": 1.0,
        "x_log_scale": 0.5,
        "x_correlation": 0.8,
    }
    for name, value in changes.items():
        changed = plain.model_copy(update={name: value})
        assert prompts_in_words(changed) != prompts_in_words(plain), name
    assert "±0.8" in prompts_in_words(plain.model_copy(update={"x_correlation": 0.8}))


def test_every_setting_of_the_model_is_said():
    def words(**settings):
        return model_in_words(LinearAttentionTransformer(ModelConfig(**settings)))

    assert words() == (
        "2 layers, 2 heads, 4 dimensions, branch norm, flatten readout, 293 parameters"
    )
    for change in (
        {"exclude_query": True},
        {"norm_affine": True},
        {"norm_eps": 1e-3},
        {"readout": "query"},
        {"normalization": "post"},
    ):
        assert words(**change) != words(), change
