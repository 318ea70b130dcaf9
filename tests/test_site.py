"""The site of the documentation builds, fetches nothing, and its search finds each task's page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What people search for, and the pages that answer it, of which one has to come first.
QUERIES = {
    "install": "install",
    "pip install": "install",
    "python version": "install",
    "gpu": "how-to/gpus-and-machines",
    "cuda": "how-to/gpus-and-machines",
    "xpu": "how-to/gpus-and-machines how-to/write-an-accelerator",
    "multi-node": "how-to/gpus-and-machines",
    "several machines": "how-to/gpus-and-machines",
    "kubernetes": "how-to/kubernetes",
    "skypilot": "how-to/kubernetes",
    "flyte": "how-to/kubernetes",
    "slurm": "how-to/slurm",
    "requeue": "how-to/slurm",
    "ray": "long-runs",
    "preemption": "long-runs",
    "restarts": "long-runs",
    "out of memory": "how-to/out-of-memory",
    "oom": "how-to/out-of-memory",
    "activation checkpointing": "how-to/out-of-memory",
    "learning rate": "how-to/schedules-and-validation",
    "scheduler": "how-to/schedules-and-validation",
    "validation": "how-to/schedules-and-validation",
    "early stopping": "how-to/schedules-and-validation",
    "warmup": "how-to/schedules-and-validation",
    "compile": "how-to/performance",
    "pin_memory": "how-to/performance",
    "num_workers": "how-to/performance how-to/troubleshooting",
    "performance": "how-to/performance",
    "faster": "how-to/performance",
    "slow training": "how-to/performance",
    "transformers": "how-to/hugging-face",
    "hugging face": "how-to/hugging-face",
    "peft": "how-to/hugging-face",
    "lora": "how-to/hugging-face",
    "generate": "how-to/hugging-face",
    "faq": "how-to/troubleshooting",
    "troubleshooting": "how-to/troubleshooting",
    "hangs": "how-to/troubleshooting",
    "nan": "how-to/bad-batches how-to/troubleshooting",
    "debug": "how-to/troubleshooting",
    "resume": "how-to/resuming",
    "checkpoint": "how-to/checkpoints",
    "save": "how-to/checkpoints",
    "load weights": "how-to/checkpoints how-to/hugging-face",
    "gradient accumulation": "how-to/accumulation",
    "gradient clipping": "how-to/accumulation",
    "mixed precision": "how-to/mixed-precision",
    "bf16 fp16": "how-to/mixed-precision",
    "accuracy": "how-to/metrics",
    "metrics": "how-to/metrics",
    "torchmetrics": "how-to/metrics",
    "gan": "how-to/several-models",
    "several optimizers": "how-to/several-models",
    "notebook": "how-to/notebooks",
    "jupyter": "how-to/notebooks",
    "fsdp": "how-to/large-models",
    "seed": "how-to/porting reference/training",
    "batchnorm": "how-to/porting",
    "port a script": "how-to/porting",
    "property test": "how-to/property-tests",
    "hypothesis": "how-to/property-tests",
    "custom strategy": "how-to/write-a-strategy",
    "torchtitan": "migrate/torchtitan coming-from",
    "distributeddataparallel": "migrate/ddp",
    "distributedsampler": "migrate/ddp how-to/troubleshooting",
    "ema": "how-to/average-weights",
    "log_alpha": "how-to/unusual-models",
    "uneven": "how-to/uneven-data",
    "tensor parallelism": "mesh features",
    "sequence parallelism": "mesh features",
    "profile": "timeline reference/logging",
    "accelerate": "migrate/accelerate how-to/porting",
    "lightning": "migrate/lightning-fabric how-to/porting",
}
_STOP_WORDS = ("a", "of", "out")
TAG = re.compile(r"<[^>]+>")


def build_index(path: Path):
    """Return an index of the sections of the site, as the search in the browser builds it.

    Args:
        path: the file that MkDocs writes for the search.
    """
    from lunr.builder import Builder
    from lunr.stop_word_filter import stop_word_filter
    from lunr.trimmer import trimmer

    content = json.loads(path.read_text())
    builder = Builder()
    builder.pipeline.add(trimmer, stop_word_filter)
    builder.ref("location")
    for name, options in content["config"]["fields"].items():
        builder.field(name, options["boost"])
    for section in content["docs"]:
        document = {
            "location": section["location"] or "index",
            "title": TAG.sub("", section["title"]),
            "text": TAG.sub(" ", section["text"]),
            "tags": "",
        }
        builder.add(document, {"boost": section.get("boost", 1)})
    return builder.build()


def first_page(index, query: str) -> str:
    """Return the page of the first section that a query finds. Empty if it finds none."""
    words = re.split(r"[\s\-]+", query)
    sections = index.search(" ".join(f"{word}*" for word in words if word not in _STOP_WORDS))
    if not sections:
        return ""
    page, _, _ = sections[0]["ref"].partition("#")
    return page.strip("/")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, in which a warning is an error, and return its folder."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    elements_that_fetch = re.compile(
        r"""<(?:script|img|iframe|link)[^>]*?\s(?:src|href)="?(?:https?:)?//|"""
        r"""url\(["']?(?:https?:)?//"""
    )
    count = 0
    for path in site.rglob("*"):
        if path.suffix not in (".html", ".css"):
            continue
        text = path.read_text()
        count += 1
        assert not elements_that_fetch.search(text), path
        assert not re.search(r":\w+:<code>", text), f"{path} shows a role of a docstring"
    assert count > len(list(ROOT.glob("docs/**/*.md")))


@pytest.mark.slow
def test_a_query_finds_the_page_of_its_task_first(site: Path) -> None:
    pytest.importorskip("lunr")
    index = build_index(site / "search" / "search_index.json")
    misses = {}
    for query, pages in QUERIES.items():
        page = first_page(index, query)
        if page not in pages.split():
            misses[query] = page
    assert misses == {}
