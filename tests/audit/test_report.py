"""An audit as text, as a dictionary and in a notebook."""

import dataclasses
import pathlib

import zerojax

ROOT = pathlib.Path(__file__).parents[1]


def test_audits_in_notebooks_name_cells_by_their_lines():
    hlo = (ROOT / "programs" / "layers-cpu8-jax0.12.hlo").read_text()
    report = zerojax.audit(hlo)
    assert f"<td>{report.traffic[0].serves}</td>" in report._repr_html_()
    one = dataclasses.replace(report.traffic[0], parts=(), source="/tmp/ipykernel_12/34.py:5")
    assert one.serves == "cell line 5"
