"""What the site adds to its pages, and that it finds links that lead nowhere."""

import importlib
import importlib.util
import json
import logging
import pathlib
import re
import sys
import types

import pytest

import zerojax

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PROGRAM = "model, optimizer = zerojax.nnx.shard(make, stage=3)"
OF_STATE = "state = zerojax.shard_train_state(make_state, stage=3)"
griffe = types.SimpleNamespace(Extension=object, Object=None, Function=None, GriffeLoader=None)


def imported(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        if importlib.util.find_spec("griffe") is None:
            patch.setitem(sys.modules, "griffe", griffe)
        return importlib.import_module(name)


hooks, links, errors, extension = map(imported, ("hooks", "links", "errors", "griffe_extension"))


def written(folder, **pages):
    for name, text in pages.items():
        path = folder / name / "index.html"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return folder


def test_links_to_missing_files_and_anchors_are_found(tmp_path):
    site = written(
        tmp_path,
        a='<h1 id="top-of-a">A</h1> <a href="../b/#there">b</a> <a href="#top-of-a">a</a> '
        '<a href="https://example.com/#x">elsewhere</a> <img src="../b/">',
        b='<h2 id="there"></h2> <a href="../a/#nowhere">a</a> <a href="../c/">c</a> '
        '<a href="02.ipynb">notebook</a> <source srcset="../a/ 1x, dark.svg 2x">',
    )
    assert links.broken(site) == [
        "b/index.html links to ../a/#nowhere: there is no such anchor",
        "b/index.html links to ../c/: there is no such file",
        "b/index.html links to 02.ipynb: there is no such file",
        "b/index.html links to dark.svg: there is no such file",
    ]


def test_a_notebooks_links_into_the_repository_lead_to_pages(caplog):
    pages = {"notebooks/02.ipynb": "../02/", "stages.md": "../../stages/"}
    file_at = lambda to: types.SimpleNamespace(url_relative_to=lambda _: to)
    known = {path: file_at(to) for path, to in pages.items()}
    files = types.SimpleNamespace(get_file_from_path=known.get)
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="notebooks/01.ipynb"))
    links = ["02.ipynb", "../docs/stages.md#dtypes", "#here", "https://jax.dev"]
    html = "".join(f'<a href="{link}">' for link in links)
    shown = hooks.on_page_content(html, page=page, files=files)
    led = ["../02/", "../../stages/#dtypes", "#here", "https://jax.dev"]
    assert re.findall('"(.*?)"', shown) == led and not caplog.records
    with caplog.at_level(logging.WARNING):
        hooks.on_page_content('<a href="../docs/no.md">', page=page, files=files)
    assert "notebooks/01.ipynb links to ../docs/no.md, which is no page" in caplog.text


def test_the_repositorys_address_comes_from_its_variable(monkeypatch):
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="notebooks/01.ipynb"))
    lines = "$ git clone <this repository> zerojax && cd zerojax"
    assert lines in (DOCS / "measured.md").read_text()
    shown = {}
    for address in ("", "https://git.example/me/zerojax", "https://github.com/me/zerojax"):
        monkeypatch.setattr(hooks, "ADDRESS", address)
        config = types.SimpleNamespace(site_name="zerojax", site_dir="site")
        hooks.on_config(config)
        assert config.repo_url == (address or None)
        wanted = lines.replace("<this repository>", address) if address else lines
        assert hooks.on_page_markdown(lines, page=None) == wanted
        shown[address] = hooks.on_page_content("<h1>", page=page, files=None)
    assert [*shown.values()][:2] == ["<h1>"] * 2
    assert "com/github/me/zerojax/blob/main/notebooks/01.ipynb" in [*shown.values()][2]


def test_a_page_with_code_has_the_program_that_it_continues_from():
    shown = hooks.on_page_markdown("# A\n\n```python\n1\n```\n\n```python\n2\n```\n", page=None)
    assert shown.count(PROGRAM) == shown.count(OF_STATE) == 1
    assert shown.index("# A") < shown.index(PROGRAM) < shown.index("```python\n1")
    text = "```bash\nls\n```\n"
    assert hooks.on_page_markdown(text, page=None) == text
    whole = "```python\nimport jax\n```\n"
    assert hooks.on_page_markdown(whole, page=None) == whole


def test_the_reference_shows_docstrings():
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="reference.md"))
    text = "# A\n\n- `zerojax.plan`: Decides\n  where.\n- `zerojax.run.log`: Prints.\n\n- `x`: y\n"
    shown = "# A\n\n::: zerojax.plan\n::: zerojax.run.log\n\n- `x`: y\n"
    assert hooks.on_page_markdown(text, page=page) == shown


def test_code_for_two_kinds_of_models_is_shown_as_tabs():
    block = "```python\n# {}\nif a:\n\n    b()\n```\n\n"
    text = "```python\nimport jax\n```\n\n" + block.format("Flax nnx") + block.format("TrainState")
    tab = '=== "{}"\n\n    ```python\n    if a:\n\n        b()\n    ```\n\n'
    shown = hooks.on_page_markdown(text + "More.\n", page=None)
    assert shown.endswith(tab.format("Flax nnx") + tab.format("TrainState") + "More.\n"), shown


def test_pages_are_written_for_github_and_shown_by_the_site():
    """Links to the README's text: the theme has its own fragments."""
    texts = {path.stem: path.read_text() for path in DOCS.glob("*.md")}
    for name, text in texts.items():
        assert not re.search(r"--8<--|#only-|\){ ", text), f"GitHub shows these: {name}"
    shown = {name: hooks.on_page_markdown(text, page=None) for name, text in texts.items()}
    assert "../README.md" not in shown["index"] and shown["index"].count(PROGRAM) == 1
    assert hooks.between_marks(hooks.README, "stages") in shown["stages"]
    assert not any("<picture" in text for text in shown.values())


def test_each_version_has_a_folder_and_the_newest_is_listed_first(tmp_path):
    config = types.SimpleNamespace(site_name="zerojax", site_dir="site")
    hooks.on_config(config)
    assert config.site_name == f"zerojax {zerojax.__version__}"
    assert pathlib.Path(config.site_dir) == pathlib.Path("site", zerojax.__version__)
    newest_first = ["0.10.0", "0.10.0rc1", "0.9.0", "0.1.0"]
    written(tmp_path, **dict.fromkeys(["dev", *newest_first[::-1]], ""))
    hooks.list_versions(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [one["version"] for one in listed] == newest_first
    assert "url=0.10.0/" in (tmp_path / "index.html").read_text()


def test_messages_are_read_from_the_source(tmp_path):
    (tmp_path / "_loss").mkdir()
    (tmp_path / "_loss" / "batch.py").write_text(
        "def f(a):\n"
        '    raise ValueError(f"{a.name} has {type(a).__name__} of <{len(a)}> rows. "\n'
        '        "Pass a_multiple.")\n'
        "def g():\n    return TypeError('no remedy')\n"
        "def h():\n    warn(f'{a} is slow. Use b.')\n"
    )
    message, warning = sorted(errors.messages(tmp_path), key=lambda one: one.remedy)
    assert warning == errors.Message("_loss/batch", "‹a› is slow.", "Use b.")
    problem = "‹name› has ‹type› of <‹a›> rows."
    assert message == errors.Message("_loss/batch", problem, "Pass a_multiple.")
    assert message.page == ("The loss and its batch", "loss.md")
    assert errors._shown(message.problem) == "<i>name</i> has <i>type</i> of &lt;<i>a</i>&gt; rows."
    assert errors._shown(message.remedy) == "Pass a\\_multiple."


def test_the_index_has_the_messages_of_each_part_once():
    text = errors.markdown()
    assert text.count("**Pass zerojax.plan(make\\_state, stage=3), or a state.**") == 1
    assert len(errors.messages()) > 150
    for _, target in errors.PAGES.values():
        assert (DOCS / target.partition("#")[0]).exists(), target


def test_arguments_that_share_a_text_have_a_line_each():
    heading, example = "Does.\n\nArguments:\n", "\nExample:\n    x, y: no argument\n"
    before = '    a, b: as for `f`; b="x" on\n        two lines.\n    c: alone, d: not.\n'
    after = '    a: as for `f`.\n    b: as for `f`; b="x" on two lines.\n    c: alone, d: not.\n'
    shown = example.replace("Example:", "Examples:")
    assert extension.spelled(heading + before + example) == heading + after + shown


def test_options_that_are_declared_elsewhere_are_shown_as_arguments(monkeypatch):
    monkeypatch.setattr(extension.griffe, "Parameter", lambda *a, **k: a[0], raising=False)
    monkeypatch.setattr(extension.griffe, "Parameters", lambda *names: names, raising=False)
    monkeypatch.setattr(extension.griffe, "ParameterKind", str, raising=False)
    docstring = types.SimpleNamespace(value="{options}", parser="google")
    module = types.SimpleNamespace(path="zerojax")
    function = types.SimpleNamespace(module=module, name="train_step", docstring=docstring)
    extension._spell_out_options(function)
    assert {"accumulate", "precision"} <= set(function.parameters)
    assert function.docstring is docstring  # whose parser finds the arguments
    assert re.search(r"\n    accumulate: .*microbatches", docstring.value)
