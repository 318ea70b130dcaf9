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
    "overnight": "long-runs",
    "over night": "long-runs",
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
    "transformers": "how-to/hugging-face how-to/finetune",
    "hugging face": "how-to/hugging-face",
    "fine-tune": "how-to/finetune",
    "fine-tuning": "how-to/finetune",
    "finetune": "how-to/finetune",
    "fine-tune a small bert": "how-to/finetune",
    "bert": "how-to/finetune",
    "bert wandb resume": "how-to/finetune",
    "wandb": "how-to/loggers how-to/finetune",
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
TAG = re.compile(r"<[^>]+>")


class SearchIndex:
    """The search of the site, which orders sections as its theme does in the browser.

    Args:
        path: the file that MkDocs writes for the search.
    """

    def __init__(self, path: Path) -> None:
        from lunr.builder import Builder
        from lunr.stop_word_filter import stop_word_filter

        content = json.loads(path.read_text())
        config = content["config"]
        assert config["pipeline"] == ["stopWordFilter"]
        self._separator = re.compile(config["separator"])
        builder = Builder()
        builder.pipeline.add(stop_word_filter)
        builder.ref("location")
        for name, options in config["fields"].items():
            builder.field(name, options["boost"])
        for section in content["docs"]:
            document = {
                "location": section["location"],
                "title": self._spaced_words(section["title"]),
                "text": self._spaced_words(section["text"]),
                "tags": "",
            }
            builder.add(document, {"boost": section.get("boost", 1)})
        self._index = builder.build()

    def first_page(self, query: str) -> str:
        """Return the page of the first section that a query finds. Empty if it finds none."""
        words = self._spaced_words(query).split()
        best_page = ""
        best_score = 0.0
        for section in self._index.search(" ".join(f"{word}*" for word in words)):
            page, _, heading = section["ref"].partition("#")
            terms = section["match_data"].metadata
            # The theme prefers whole pages, and sections that have every word of the query.
            boost = 0
            if not heading:
                boost += 1
            if all(any(term.startswith(word) for term in terms) for word in words):
                boost += 1
            score = section["score"] * (1 + boost**2)
            if score > best_score:
                best_page = page.strip("/")
                best_score = score
        return best_page

    def _spaced_words(self, text: str) -> str:
        """Return the words of a text, without tags, between single spaces."""
        words = self._separator.split(TAG.sub(" ", text))
        return " ".join(word for word in words if word)


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
    index = SearchIndex(site / "search" / "search_index.json")
    misses = {}
    for query, pages in QUERIES.items():
        page = index.first_page(query)
        if page not in pages.split():
            misses[query] = page
    assert misses == {}
