"""Hooks of MkDocs: pages that are made at the build, links that lead out of docs/, headings named as on GitHub, formulas as MathML.

The pages under docs/ are written for GitHub, where a relative link may lead to any file of the repository. Here the README becomes the
home page, and a linked file outside docs/ becomes a page that shows it. Only MkDocs, its extensions and latex2mathml are needed: nothing of
agentrl is imported.
"""

from __future__ import annotations

import ast
import html
import json
import posixpath
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WHOLE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files beside docs/ that are pages of their own."""
ORIGINS = {page: origin for origin, page in WHOLE.items()}

LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.DOTALL | re.MULTILINE)
LEXERS = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".jsonl": "json", ".json": "json", ".sh": "bash", ".txt": "text"}
SECTIONS = {
    "environments": ("Environments", ("agentrl.env", "agentrl.suites", "agentrl.core.types")),
    "commands": ("Commands from Python", ("agentrl.api",)),
    "algorithms": ("Algorithms", ("agentrl.algo", "agentrl.core.summaries")),
    "callbacks": ("Callbacks", ("agentrl.core.callbacks",)),
    "engines": ("Engines", ("agentrl.engine",)),
    "errors": ("Errors", ("agentrl.core.errors",)),
}
"""Pages of the reference: the title, and the packages whose public names they hold."""


def on_config(config: Any) -> Any:
    """Name headings as GitHub does, so that links to them hold in both places, and the version in the title of every page."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    config.site_name = f"agentrl {tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']['version']}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    pages = {page: (ROOT / origin).read_text(encoding="utf-8") for origin, page in WHOLE.items()}
    texts = {origin_of(file.src_uri): file.content_string for file in files.documentation_pages()}
    texts |= {origin: pages[page] for origin, page in WHOLE.items()}
    pages |= dict(reference_pages()) | dict(source_pages(texts))
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links that are right in the repository to their pages."""
    uri = page.file.src_uri
    return markdown if uri.startswith(("source/", "reference/")) else relinked(markdown, uri)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Write formulas as MathML, which browsers show without a script."""
    return re.sub(r'<(span|div) class="arithmatex">(.*?)</\1>', _formula, content, flags=re.DOTALL)


def slug(title: str, separator: str = "-") -> str:
    """The name of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", separator)


def origin_of(uri: str) -> str:
    """Path of a page's text in the repository."""
    return ORIGINS.get(uri, f"docs/{uri}")


def outside_code(markdown: str) -> Iterator[tuple[str, bool]]:
    """The parts of a page, each with True if it is not in a block of code."""
    end = 0
    for block in FENCE.finditer(markdown):
        yield markdown[end : block.start()], True
        yield block.group(), False
        end = block.end()
    yield markdown[end:], True


def targets(markdown: str, origin: str) -> Iterator[str]:
    """Paths in the repository to which the links of a text lead; `origin` is its own path."""
    for part, text in outside_code(markdown):
        if text:
            yield from (resolved(origin, link.group(2)) for link in LINK.finditer(part))


def resolved(origin: str, link: str) -> str:
    """The path in the repository that a relative link means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def page_of(path: str) -> str:
    """The page of the site for a path in the repository."""
    if path in WHOLE:
        return WHOLE[path]
    if path.startswith("docs/") and not path.startswith("docs/models"):
        return path.removeprefix("docs/")
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def relinked(markdown: str, uri: str) -> str:
    """The text of a page with its links changed to those of the site."""
    origin, folder = origin_of(uri), posixpath.dirname(uri) or "."

    def change(link: re.Match[str]) -> str:
        target = posixpath.relpath(page_of(resolved(origin, link.group(2))), folder)
        return f"{link.group(1)}{target}{link.group(3) or ''}{link.group(4)}"

    return "".join(LINK.sub(change, part) if text else part for part, text in outside_code(markdown))


def source_pages(texts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """A page for every file and folder outside docs/ that a page leads to."""
    linked = {path for origin, text in texts.items() for path in targets(text, origin)}
    for path in sorted(linked):
        uri, file = page_of(path), ROOT / path
        if uri.startswith("source/") and file.exists():  # a link that leads nowhere is left for MkDocs to report
            yield uri, _folder(path) if file.is_dir() else _shown(path)


def _folder(path: str) -> str:
    files = sorted(file for file in (ROOT / path).iterdir() if not file.name.startswith(("__", ".")))
    rows = [f"| `{file.name}{'/' if file.is_dir() else ''}` | {_first_line(file)} |" for file in files]
    return _titled(path, "\n".join(["| file | what it is |", "|---|---|", *rows]))


def _first_line(file: Path) -> str:
    if file.suffix != ".py":
        return ""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("``", "`").replace("|", "\\|")


def _shown(path: str) -> str:
    file = ROOT / path
    if file.suffix == ".ipynb":
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        return _titled(path, "\n\n".join(_cell(cell["cell_type"], "".join(cell["source"])) for cell in cells))
    return _titled(path, _code(file.read_text(encoding="utf-8"), LEXERS.get(file.suffix, "text")))


def _cell(kind: str, text: str) -> str:
    return _code(text, "python") if kind == "code" else re.sub(r"^#", "##", LINK.sub(lambda link: link.group(2), text))


def _code(text: str, lexer: str) -> str:
    return f"~~~~~~~~{lexer}\n{text.rstrip()}\n~~~~~~~~"


def _titled(path: str, body: str) -> str:
    return f"---\nsearch:\n  exclude: true\ntitle: {path}\n---\n\n# {path}\n\n{body}\n"


def reference_pages() -> Iterator[tuple[str, str]]:
    """The pages of the reference, one for each section, with every public name of agentrl once."""
    homes = public_names((ROOT / "agentrl" / "__init__.py").read_text(encoding="utf-8"))
    for page, (title, packages) in SECTIONS.items():
        names = {name: home for name, home in homes.items() if home.startswith(packages)}
        yield f"reference/{page}.md", f"# {title}\n\n" + "\n".join(_documented(name, home) for name, home in names.items())


def public_names(source: str) -> dict[str, str]:
    """Each name in ``__all__``, with the dotted path at which it is defined, in the order of the imports."""
    tree = ast.parse(source)
    exported: set[str] = set()
    homes: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = set(ast.literal_eval(node.value))
    return {name: home for name, home in homes.items() if name in exported}


def _documented(name: str, home: str) -> str:
    return f"::: {home}\n    options:\n      heading: agentrl.{name}\n      toc_label: {name}\n"


def missing_names(homes: Iterable[str]) -> set[str]:
    """Definitions that no page of the reference would hold."""
    packages = tuple(package for _, parts in SECTIONS.values() for package in parts)
    return {home for home in homes if not home.startswith(packages)}


def _formula(found: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    text = html.unescape(found.group(2)).strip()
    return convert(text[2:-2], display="block" if found.group(1) == "div" else "inline")
