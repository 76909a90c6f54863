"""The sites of a model as a table, and the titles that tables by site carry to their figures."""

from __future__ import annotations

import pandas as pd

from models.architecture.sites import Studied


def sites(model: Studied) -> pd.DataFrame:
    """All sites of a model in forward order.

    Returns:
        DataFrame with columns site, role, layer (missing outside the blocks), axes (axis words),
        shape (sizes of this model, "b" for the batch), meaning.
    """
    sizes = {"batch": "b", **model.axis_sizes}
    rows = [
        {
            "site": site.name,
            "role": site.role,
            "layer": site.layer,
            "axes": " ".join(site.axes),
            "shape": " ".join(str(sizes[axis]) for axis in site.axes),
            "meaning": site.meaning,
        }
        for site in model.sites.values()
    ]
    return pd.DataFrame(rows).astype({"layer": "Int64"})


def with_titles(table: pd.DataFrame, model: Studied) -> pd.DataFrame:
    """The table itself, with the title of every site of the model in ``attrs["titles"]``.

    Every site, so that tables of one model have the same attributes: `pandas.concat` drops those
    that differ.
    """
    table.attrs["titles"] = {site.name: site.title for site in model.sites.values()}
    return table
