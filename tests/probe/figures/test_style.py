import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from PIL import Image

from probe.figures.style import COLUMN, PALETTE, heatmap, new_axes, save_figure, style


def draw():
    ax = new_axes()
    ax.plot([1, 2, 3], label="ŷ against x̄")
    ax.legend()
    return ax.figure


def test_saved_files_are_the_same_bytes_each_time(tmp_path):
    data = pd.DataFrame({"x": [1.0, 1 / 3]})
    files = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        with style():
            paths = save_figure(draw(), folder, "line", data)
        files.append({path.name: path.read_bytes() for path in paths})
    assert files[0] == files[1]
    assert set(files[0]) == {"line.pdf", "line.png", "line.csv"}


def test_pdf_embeds_its_font_and_png_has_300_dots_per_inch(tmp_path):
    with style():
        pdf, png, _ = save_figure(draw(), tmp_path, "line", pd.DataFrame())
    content = pdf.read_bytes()
    assert b"/FontFile2" in content  # embedded TrueType
    assert b"/CIDFontType2" in content  # text as characters of it, not as outlines
    picture = Image.open(png)
    assert picture.size[0] == round(300 * COLUMN)
    assert round(picture.info["dpi"][0]) == 300


def test_neighbouring_colours_differ_in_grey():
    luminance = [
        mpl.colors.to_rgb(colour) @ np.array([0.2126, 0.7152, 0.0722]) for colour in PALETTE
    ]
    assert np.abs(np.diff(luminance[:4])).min() > 0.07


def test_style_leaves_global_settings_alone():
    before = mpl.rcParams.copy()
    with style():
        assert mpl.rcParams["pdf.fonttype"] == 42
    assert mpl.rcParams == before


def test_heatmap_has_a_fixed_scale_labels_and_blank_cells():
    table = pd.DataFrame([[0.5, np.nan], [-1.0, 0.0]], index=["a", "b"], columns=["c", "d"])
    with style():
        axes = plt.figure().subplots(1, 2)
        left = heatmap(table, axes[0], signed=True, colorbar=False)
        right = heatmap(table, axes[1], labels=table.map(lambda value: f"<{value}>"))
    mesh = left.collections[0]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (-1, 1)
    assert [text.get_text() for text in left.texts] == ["0.50", "", "-1.00", "0.00"]
    assert right.texts[0].get_text() == "<0.5>"
    assert mesh.get_array().mask.ravel().tolist() == [False, True, False, False]
    assert [label.get_text() for label in left.get_yticklabels()] == ["a", "b"]
    # First row on top, as in the table.
    assert left.get_ylim() == (2, 0)
