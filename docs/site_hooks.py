"""Hooks of mkdocs: the README becomes the home page, and files that pages link to become part of the site.

Pages link to them as to any file, `../CHANGELOG.md`, so the links work in the repository, too.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
TEXTS = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
FILES = [
    "benchmarks/NOTES.md",
    "examples/qwen3_moe.py",
    "examples/train_deepseek_style.py",
    "examples/train_expert_parallel.py",
    "examples/train_qwen3_moe.py",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "benchmarks" / "results").glob("*.png"))),
]


def on_files(files, config):
    for name in FILES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for name, page in TEXTS.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    above = "../" * page.file.src_uri.count("/")
    if page.file.src_uri in FILES:  # a file beside docs/ links into it, where the site has its pages at the top
        markdown = markdown.replace(f"]({above}docs/", f"]({above}")
    for name, target in (TEXTS | dict(zip(FILES, FILES, strict=True))).items():
        markdown = re.sub(rf"\]\({re.escape(above)}\.\./{re.escape(name)}(?=[)#])", f"]({above}{target}", markdown)
    return markdown
