"""Checkpoints: round trips, the paper's convention, and everything that is refused."""

import itertools
import json
import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import (
    CheckpointError,
    LinearAttentionTransformer,
    ModelConfig,
    PromptConfig,
    available,
    from_paper_weights,
    load,
    save,
)
from models import checkpoint as checkpoint_module
from models.architecture.registry import ARCHITECTURES, register
from models.checkpoint import checkpoint_hash, provenance, resolve, training_prompts

FOREIGN = Path(__file__).parents[1] / "data" / "foreign_l1.safetensors"
CONFIG = ModelConfig(n_context=5, norm_affine=True)
OWN = ["config.json", "model.safetensors", "training.json"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def model(generator):
    return LinearAttentionTransformer(CONFIG, generator)


@pytest.fixture
def folder(model, tmp_path):
    return save(model, tmp_path / "mine", seed=3)


def same_weights(a, b) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(m == n and torch.equal(v, w) and v.dtype == w.dtype for (m, v), (n, w) in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_round_trip_keeps_bits_dtype_and_config(model, tmp_path, dtype):
    model = model.to(dtype)
    back = load(save(model, tmp_path / "deep" / "er"))
    assert same_weights(back, model)
    assert back.cfg == CONFIG
    other = torch.float64 if dtype == torch.float32 else torch.float32
    assert load(tmp_path / "deep" / "er", dtype=other).embed.W_E.dtype == other


def test_provenance_and_training_prompts_come_back(model, tmp_path):
    prompts = PromptConfig(n_context=5, x_mean_std=1)
    folder = save(model, tmp_path / "a", prompts=prompts, loss=[3.0, 1.0])
    assert provenance(folder)["loss"] == [3.0, 1.0]
    assert training_prompts(folder) == prompts
    bare = save(model, tmp_path / "b")
    assert training_prompts(bare) == PromptConfig(n_context=5)
    (bare / "training.json").unlink()
    assert provenance(bare) == {}
    assert same_weights(load(bare), model)


def test_saving_again_replaces_and_leaves_nothing_behind(model, folder, tmp_path):
    before = checkpoint_hash(folder)
    with torch.no_grad():
        model.embed.W_E += 1
    save(model, folder)
    assert checkpoint_hash(folder) != before
    assert same_weights(load(folder), model)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    assert names_in(folder) == OWN


def test_the_hash_is_of_config_and_weights(model, folder, tmp_path):
    assert checkpoint_hash(save(model, tmp_path / "again", seed=99)) == checkpoint_hash(folder)


def test_a_failed_save_changes_nothing(model, folder, tmp_path, monkeypatch):
    before = checkpoint_hash(folder)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    for name in ("mkdir", "fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            for target in (folder, tmp_path / "new"):
                with pytest.raises(CheckpointError, match=r"No space left.*nothing was changed"):
                    save(model, target)
        assert checkpoint_hash(folder) == before
        assert [p.name for p in tmp_path.iterdir()] == ["mine"]
        assert names_in(folder) == OWN


def killed_at(step: int, work) -> bool:
    """Run `work` in a process that dies by SIGKILL at one call that changes a folder.

    Odd steps die before the call, even ones after it. False if there was no such call.
    """
    child = os.fork()
    if child == 0:
        calls = itertools.count(1)

        def dying(call):
            def counted(*args, **kwargs):
                if next(calls) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = call(*args, **kwargs)
                if next(calls) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return counted

        for name in ("mkdir", "fsync", "replace", "rename", "rmdir", "unlink"):
            setattr(os, name, dying(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_save_killed_anywhere_leaves_one_whole_checkpoint(tmp_path, generator):
    old, new, third = (LinearAttentionTransformer(CONFIG, generator) for _ in range(3))
    found = []
    for step in itertools.count(1):
        folder = save(old, tmp_path / f"{step}", l1=1)
        (folder / "notes.md").write_text("mine")
        if not killed_at(step, lambda folder=folder: save(new, folder, l1=2)):
            break
        l1 = provenance(folder)["l1"]
        assert same_weights(load(folder), {1: old, 2: new}[l1])
        found.append(l1)
        # The next save tidies up, and a load never does.
        before = names_in(folder)
        load(folder)
        assert names_in(folder) == before
        save(third, folder, l1=3)
        assert same_weights(load(folder), third)
        assert names_in(folder) == sorted([*OWN, "notes.md"])
        assert (folder / "notes.md").read_text() == "mine"
    assert found == sorted(found)
    assert found.count(1) > 5 < found.count(2)


def test_a_first_save_killed_anywhere_can_be_repeated(tmp_path, model):
    outcomes = set()
    for step in itertools.count(1):
        folder = tmp_path / f"{step}"
        if not killed_at(step, lambda folder=folder: save(model, folder)):
            break
        outcomes.add(checkpoint_module.holds_checkpoint(folder))
        if checkpoint_module.holds_checkpoint(folder):
            assert same_weights(load(folder), model)
        save(model, folder)
        assert names_in(folder) == OWN
    assert outcomes == {False, True}


def test_files_of_two_saves_are_not_mixed(model, folder, tmp_path, generator):
    other = save(LinearAttentionTransformer(CONFIG, generator), tmp_path / "other")
    shutil.copy(other / "model.safetensors", folder)
    with pytest.raises(CheckpointError, match="of different saves"):
        load(folder)
    shutil.copy(other / "config.json", folder)
    load(folder)


def test_a_save_replaces_its_own_files_only(model, folder):
    (folder / "notes").mkdir()
    (folder / "notes" / "thesis.tex").write_text("work")
    (folder / "figure.png").write_text("drawn")
    save(model, folder)
    assert names_in(folder) == sorted([*OWN, "notes", "figure.png"])
    assert (folder / "notes" / "thesis.tex").read_text() == "work"


@pytest.mark.parametrize("content", ["{}", '{"name": "my-site"}', "no json", "[1]"])
def test_a_folder_with_a_foreign_config_is_refused(model, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "thesis.tex").write_text("work")
    with pytest.raises(CheckpointError, match="is not a checkpoint that could be replaced"):
        save(model, tmp_path)
    assert (tmp_path / "config.json").read_text() == content
    assert names_in(tmp_path) == ["config.json", "thesis.tex"]


def test_a_link_to_a_folder_stays_a_link(model, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for target in (folder, tmp_path / "empty", tmp_path / "missing"):
        link = tmp_path / "link"
        link.symlink_to(target)
        assert save(model, link) == target
        assert link.is_symlink()
        assert names_in(target) == OWN
        assert same_weights(load(link), model)
        link.unlink()
    assert names_in(tmp_path) == ["empty", "mine", "missing"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_mode_that_the_umask_leaves(model, tmp_path, umask):
    before = os.umask(umask)
    try:
        folder = save(model, tmp_path / "mine")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    for name in OWN:
        assert (folder / name).stat().st_mode & 0o777 == 0o666 & ~umask, name


@pytest.mark.parametrize("name", ["best.ckpt", "a.pt", ".hidden", "two words", "ü", "1e-3"])
def test_any_name_of_a_folder_round_trips(model, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    save(model, name, prompts=PromptConfig(n_context=5, noise_std=0.3))
    for given in (name, f"./{name}", f"{name}/", Path(name), tmp_path / name):
        assert same_weights(load(given), model)
        assert training_prompts(given).noise_std == 0.3


@register
class Squared(LinearAttentionTransformer):
    """A class of its own: the same parameters and sites, but it predicts the square."""

    architecture = "test_squared"

    def forward(self, inputs):
        return super().forward(inputs).square()


class Unregistered(Squared):
    """Inherits the name of its parent."""


def test_a_registered_class_comes_back_as_itself(tmp_path, generator):
    model = Squared(CONFIG, generator)
    inputs = torch.randn(3, 6, 3, generator=generator)
    back = load(save(model, tmp_path / "squared"))
    assert type(back) is Squared
    torch.testing.assert_close(back(inputs), model(inputs), rtol=0, atol=0)
    # Positive control: the plain class on the same weights predicts otherwise.
    plain = LinearAttentionTransformer(CONFIG)
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(inputs), model(inputs))
    assert type(load(save(plain, tmp_path / "plain"))) is LinearAttentionTransformer


def test_a_class_that_is_not_registered_is_refused(tmp_path, generator, monkeypatch):
    with pytest.raises(CheckpointError, match=r"Unregistered is not registered.*decorate"):
        save(Unregistered(CONFIG, generator), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    folder = save(Squared(CONFIG, generator), tmp_path / "squared")
    monkeypatch.delitem(ARCHITECTURES, "test_squared")
    with pytest.raises(CheckpointError, match=r"'test_squared' is not one of linear_attention"):
        load(folder)


def test_a_model_whose_parameters_are_not_those_of_its_config_is_refused(model, tmp_path):
    model.extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(CheckpointError, match="foreign extra"):
        save(model, tmp_path / "new")


def test_a_shipped_name_and_a_path_are_told_apart(model, tmp_path, monkeypatch):
    name = available()[0]
    monkeypatch.chdir(tmp_path)
    assert resolve(name) == (checkpoint_module.SHIPPED / name, f"shipped:{name}")
    assert resolve(f"shipped:{name}") == resolve(name)
    assert resolve(checkpoint_module.SHIPPED / name) == resolve(name)
    for path in (f"./{name}", f"{name}/", Path(name), f"{tmp_path}/{name}"):
        with pytest.raises(CheckpointError, match="is not a folder"):
            load(path)

    save(model, name, prompts=PromptConfig(n_context=5, noise_std=0.7))
    for read in (load, training_prompts, provenance, checkpoint_hash):
        with pytest.raises(CheckpointError, match=rf"give shipped:{name} .* \./{name} for"):
            read(name)
    assert resolve(f"./{name}") == (Path(name), f"./{name}")
    for path in (f"./{name}", f"{name}/", Path(name)):
        assert same_weights(load(path), model)
        assert training_prompts(path).noise_std == 0.7
    shipped = f"shipped:{name}"
    assert not same_weights(load(shipped), model)
    assert checkpoint_hash(shipped) == checkpoint_hash(checkpoint_module.SHIPPED / name)
    # Among the shipped ones themselves a name means what it always does.
    monkeypatch.chdir(checkpoint_module.SHIPPED)
    assert resolve(name) == (checkpoint_module.SHIPPED / name, shipped)


def test_shipped_names_are_not_written_to(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="which is not written to; give a folder"):
        save(model, f"shipped:{available()[0]}")
    with pytest.raises(CheckpointError, match=r"is not shipped; near matches: varied_l1"):
        load("shipped:varied_l1_9e-4_seed0")


def test_prompts_on_record_must_fit_the_model(tmp_path, generator):
    def recorded(name, **prompts):
        model = LinearAttentionTransformer(configs[name], generator)
        return training_prompts(save(model, tmp_path / name, prompts=PromptConfig(**prompts)))

    configs = {"flatten": ModelConfig(n_context=5), "query": ModelConfig(readout="query")}
    with pytest.raises(
        CheckpointError, match=r"training.json has .*n_context=9, .*config.json .*n_context=5"
    ):
        recorded("flatten", n_context=9)
    with pytest.raises(CheckpointError, match=r"n_covariates=2, .*n_covariates=1"):
        recorded("flatten", n_context=5, n_covariates=2)
    # The query readout takes prompts of any length.
    assert recorded("query", n_context=9).n_context == 9


@pytest.mark.parametrize("field", ModelConfig.model_fields)
def test_every_field_of_the_config_must_be_there(folder, field):
    raw = json.loads((folder / "config.json").read_text())
    del raw["model"][field]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=f"config.json: 'model' lacks {field};"):
        load(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"n_layers": 200_000},
        {"n_heads": 10**400},
        {"d_model": 10**4000},
        {"x" * 10**6: 1},
        {f"field{i}": 1 for i in range(10**4)},
        {"normalization": "x" * 10**6},
    ],
    ids=["layers", "heads", "width", "long key", "many keys", "long value"],
)
def test_messages_about_absurd_configs_are_short(folder, change, monkeypatch):
    monkeypatch.setattr("models.architecture.config.machine_memory", lambda: 2**60)
    edit_config(folder, change)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert len(str(caught.value)) < 2000


def test_foreign_weights_reproduce_their_predictions():
    tensors = load_file(FOREIGN)
    model = from_paper_weights(tensors, ModelConfig(n_context=50))
    found = model(tensors["example_inputs"]).detach()
    torch.testing.assert_close(found, tensors["example_predictions"], rtol=1e-5, atol=0)
    # In single precision the smallest predictions lose digits; relative to their size they agree.
    single = from_paper_weights(tensors, ModelConfig(n_context=50), dtype=torch.float32)
    found = single(tensors["example_inputs"]).detach().double()
    largest = float(tensors["example_predictions"].abs().max())
    torch.testing.assert_close(found, tensors["example_predictions"], rtol=0, atol=1e-5 * largest)


def test_paper_weights_keep_their_meaning(generator):
    d, p, n = 5, 2, 4
    config = ModelConfig(d_model=d, n_layers=1, n_heads=3, n_context=n, n_covariates=p)
    draw = {"generator": generator, "dtype": torch.float64}
    tensors = {"W_in": torch.randn(d, 2 + p, **draw), "b_in": torch.randn(d, **draw)}
    tensors |= {f"layers.0.W{i}": torch.randn(3, d, d, **draw) for i in (1, 2, 3)}
    tensors |= {"W_out": torch.randn((n + 1) * d, **draw), "b_out": torch.randn(1, **draw)}
    prompt = torch.randn(n + 1, 2 + p, **draw)
    stream = prompt @ tensors["W_in"].T + tensors["b_in"]
    w1, w2, w3 = (tensors[f"layers.0.W{i}"] for i in (1, 2, 3))
    total = sum((stream @ w3[h]) @ (w1[h] @ stream.T @ stream @ w2[h]) for h in range(3))
    stream = stream + torch.nn.functional.layer_norm(total, (d,))
    expected = stream.flatten() @ tensors["W_out"] + tensors["b_out"]
    numpy_tensors = {name: value.numpy() for name, value in tensors.items()}
    torch.testing.assert_close(from_paper_weights(numpy_tensors, config)(prompt[None]), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("W_out"), "missing W_out"),
        (lambda t: t.pop("W_in"), "missing W_in"),
        (lambda t: t.update(W_mlp=torch.zeros(3)), "foreign W_mlp"),
        (lambda t: t.update(W_in=t["W_in"].T), r"W_in has shape \[3, 4\].*\[4, 3\]"),
        (lambda t: t["W_in"].fill_(float("nan")), "W_in holds 12 NaN"),
    ],
)
def test_bad_paper_weights_are_refused(change, message):
    tensors = load_file(FOREIGN)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        from_paper_weights(tensors, ModelConfig(n_context=50))
    with pytest.raises(CheckpointError, match="no affine map"):
        from_paper_weights(tensors, ModelConfig(n_context=50, norm_affine=True))


def rewrite(folder: Path, **changes) -> None:
    """Change weights of a checkpoint on disk; None drops a tensor."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors")


def edit_config(folder: Path, model: dict | None = None, **top) -> None:
    raw = json.loads((folder / "config.json").read_text()) | top
    raw["model"] |= model or {}
    (folder / "config.json").write_text(json.dumps(raw))


class Bomb:
    def __reduce__(self):
        return (os._exit, (66,))


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.pt").write_bytes(pickle.dumps(Bomb()))


BAD_FOLDERS = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "a pickle beside it": (only_a_pickle, "model.pt is a pickle and is never opened"),
    "a pickle as weights": (
        lambda f: (f / "model.safetensors").write_bytes(pickle.dumps(Bomb())),
        "truncated or is not a safetensors file",
    ),
    "truncated weights": (
        lambda f: os.truncate(f / "model.safetensors", 700),
        "truncated or is not a safetensors file",
    ),
    "empty weights": (
        lambda f: os.truncate(f / "model.safetensors", 0),
        "truncated or is not a safetensors file",
    ),
    "truncated config": (lambda f: os.truncate(f / "config.json", 40), "truncated or is not JSON"),
    "config not an object": (lambda f: (f / "config.json").write_text("[1]"), "holds a list"),
    "foreign top key": (lambda f: edit_config(f, vocab=1), "keys 'model' and 'dtype'"),
    "unknown config key": (lambda f: edit_config(f, {"d_mlp": 16}), "d_mlp"),
    "bad config value": (lambda f: edit_config(f, {"d_model": -4}), "d_model"),
    "absurd width": (lambda f: edit_config(f, {"d_model": 10**7}), "needs .* GiB"),
    "absurd depth": (lambda f: edit_config(f, {"n_layers": 10**9}), "needs .* GiB"),
    "absurd number": (lambda f: edit_config(f, {"n_heads": 10**400}), "n_heads"),
    "unknown class": (lambda f: edit_config(f, architecture="rnn"), "'rnn' is not one of"),
    "unknown dtype": (lambda f: edit_config(f, dtype="float16"), "'float16' is not one of"),
    "dtype disagrees": (lambda f: edit_config(f, dtype="float64"), "is float32, .* says float64"),
    "foreign tensor": (lambda f: rewrite(f, extra=torch.ones(2)), "foreign extra"),
    "missing tensor": (
        lambda f: rewrite(f, **{"unembed.W_U": None}),
        "missing unembed.W_U; the config asks for exactly",
    ),
    "wrong shape": (
        lambda f: rewrite(f, **{"embed.W_E": torch.ones(4, 3)}),
        r"embed.W_E has shape \[4, 3\], the config asks for \[3, 4\]",
    ),
    "NaN weights": (
        lambda f: rewrite(f, **{"embed.b_E": torch.full((4,), float("nan"))}),
        "embed.b_E holds 4 NaN",
    ),
    "half precision": (
        lambda f: rewrite(f, **{"embed.b_E": torch.zeros(4, dtype=torch.float16)}),
        "embed.b_E is F16",
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folders_are_refused(folder, case):
    damage, message = BAD_FOLDERS[case]
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_prompts_on_record_must_be_prompts(model, tmp_path):
    folder = save(model, tmp_path / "a", prompts={"n_context": 5, "colour": "red"})
    with pytest.raises(CheckpointError, match="colour"):
        training_prompts(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_model", "neither a shipped name nor a folder.*shipped: "),
        ("../secrets", "is not a folder"),
        ("a/b", "is not a folder"),
        ("", "is not a folder"),
        ("weights.pt", "a pickle can run code and is never opened"),
    ],
)
def test_bad_names_are_refused(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(name)


def test_a_file_is_not_a_checkpoint(folder):
    with pytest.raises(CheckpointError, match="it is a file"):
        load(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("provenance", "message"),
    [
        ({"loss": float("nan")}, "finite JSON values"),
        ({"thing": object()}, "finite JSON values"),
    ],
)
def test_bad_provenance_is_refused_before_writing(model, tmp_path, provenance, message):
    with pytest.raises(CheckpointError, match=message):
        save(model, tmp_path / "new", **provenance)
    assert list(tmp_path.iterdir()) == []


def test_bad_models_are_refused_before_writing(model, tmp_path):
    with pytest.raises(CheckpointError, match=r"dtype bfloat16.*model.float\(\)"):
        save(model.bfloat16(), tmp_path / "new")
    with torch.no_grad():
        model = model.float()
        model.embed.W_E[0, 0] = float("inf")
    with pytest.raises(CheckpointError, match=r"embed.W_E holds 1 NaN or infinite"):
        save(model, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_not_overwritten(model, tmp_path):
    (tmp_path / "thesis.tex").write_text("work")
    (tmp_path / "linked").symlink_to(tmp_path)
    for folder in (tmp_path, tmp_path / "linked"):
        with pytest.raises(CheckpointError, match="is not a checkpoint; choose another folder"):
            save(model, folder)
    assert (tmp_path / "thesis.tex").read_text() == "work"
    with pytest.raises(CheckpointError, match="cannot write"):
        save(model, tmp_path / "thesis.tex" / "below")


@pytest.mark.parametrize("name", available())
def test_shipped_checkpoints_load(name, generator, tmp_path):
    model = load(name)
    copy = shutil.copytree(checkpoint_module.SHIPPED / name, tmp_path / name)
    assert same_weights(load(copy), model)
    assert training_prompts(name).n_context == model.cfg.n_context
