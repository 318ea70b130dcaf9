"""Fine-tune a small BERT on some processes, and resume it on another number of processes."""

import argparse
import shutil

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_cosine_schedule_with_warmup

from fabric import Fabric
from fabric.loggers import CSVLogger

FOLDER = "runs/bert"  # checkpoints, logs and the trained model
BATCH_SIZE = 32  # of all processes together
EPOCHS = 3
LEARNING_RATE = 5e-4
SAVE_EVERY = 20  # steps

GOOD = ["brilliant", "charming", "fresh", "funny", "moving", "superb", "warm", "witty"]
BAD = ["boring", "clumsy", "dull", "flat", "lazy", "stale", "tedious", "weak"]
OTHER = ["a", "and", "but", "cast", "ending", "film", "is", "it", "plot", "script", "the", "was"]
WORDS = ["[PAD]", "[CLS]", "[SEP]", *GOOD, *BAD, *OTHER]
PAD, CLS, SEP = 0, 1, 2


class Reviews(Dataset):
    """Reviews of 6 to 24 words. The label says whether more words are good than bad."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        self.samples = []
        while len(self.samples) < size:
            length = int(torch.randint(6, 25, (1,), generator=generator))
            words = torch.randint(3, len(WORDS), (length,), generator=generator)
            good = int((words < 3 + len(GOOD)).sum())
            bad = int((words < 3 + len(GOOD) + len(BAD)).sum()) - good
            if good != bad:
                input_ids = [CLS, *words.tolist(), SEP]
                self.samples.append({"input_ids": input_ids, "label": int(good > bad)})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict:
        return self.samples[index]


def collate(samples: list[dict]) -> dict[str, torch.Tensor]:
    """Return a batch, in which each review is padded to the length of the longest one."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    input_ids = torch.full((len(samples), longest), PAD)
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "labels": torch.tensor([sample["label"] for sample in samples]),
    }


def build_model() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        # 0.1 is usual. Without dropout, the losses do not depend on the number of processes.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def build_logger(wandb_mode: str | None):
    """Return a run of W&B, or without a mode a logger that writes metrics.csv."""
    if wandb_mode is None:
        return CSVLogger(FOLDER, name="log", version=0)
    import wandb

    # The id makes one run of all starts of this script. Choose a new one with a new FOLDER.
    return wandb.init(project="bert", id="bert-1", resume="allow", mode=wandb_mode, dir=FOLDER)


@torch.no_grad()
def evaluate(fabric: Fabric, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the share of the reviews that are classified correctly, each one counted once."""
    model.eval()
    correct = total = 0
    for batch in loader:
        guesses = model(**batch).logits.argmax(dim=1)
        # Of all processes, without the samples that fill up the last batches.
        guesses, labels = fabric.gather_for_metrics((guesses, batch["labels"]))
        correct += int((guesses == labels).sum())
        total += len(labels)
    model.train()
    return correct / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto", help="how many processes")
    parser.add_argument("--wandb", choices=["offline", "online"], help="log to W&B")
    args = parser.parse_args()

    fabric = Fabric(accelerator=args.accelerator, devices=args.devices)
    fabric.launch()
    fabric.seed_everything(0, per_rank="after_setup")

    # The batch size of a loader is that of one process. All processes together use BATCH_SIZE
    # samples a step, so that another number of processes changes neither steps nor schedule.
    batch_size, remainder = divmod(BATCH_SIZE, fabric.world_size)
    if remainder:
        raise SystemExit(f"{fabric.world_size} processes cannot share a batch of {BATCH_SIZE}")
    train_data = Reviews(3200, torch.Generator().manual_seed(1))
    test_data = Reviews(500, torch.Generator().manual_seed(2))
    train_loader, test_loader = fabric.setup_dataloaders(
        DataLoader(train_data, batch_size, collate_fn=collate, shuffle=True, drop_last=True),
        DataLoader(test_data, batch_size, collate_fn=collate),
    )

    with fabric.rank_zero_first(local=True):  # if it downloads: once on each machine
        model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    steps = EPOCHS * len(train_loader)
    scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)

    checkpoints = fabric.checkpoints(FOLDER, keep=2, best=("accuracy", "max"))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": train_loader}
    step = checkpoints.restore(state) or 0
    if fabric.is_global_zero:
        fabric.add_logger(build_logger(args.wandb))
    fabric.print(f"{fabric.world_size} x {batch_size} reviews a step, from step {step}")

    model.train()  # from_pretrained() returns a model in evaluation mode
    while step < steps:
        for batch in train_loader:
            loss = model(**batch).loss
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1

            if step % 10 == 0:
                mean_loss = float(fabric.all_reduce(loss.detach()))  # over all processes
                learning_rate = scheduler.get_last_lr()[0]
                values = {"loss": mean_loss, "norm": norm, "learning_rate": learning_rate}
                fabric.log_dict(values, step)
                fabric.print(f"step {step}: loss {mean_loss:.4f}")
            if fabric.should_stop:  # on SIGTERM, and before a SLURM job ends
                checkpoints.save(step, state)
                fabric.print(f"stopped after step {step}")
                fabric.exit_preempted(requeue=True)
            if step % len(train_loader) == 0:
                accuracy = evaluate(fabric, model, test_loader)
                fabric.log("accuracy", accuracy, step)
                fabric.print(f"step {step}: accuracy {accuracy:.3f}")
                checkpoints.save(step, state, {"accuracy": accuracy})
            elif step % SAVE_EVERY == 0:
                checkpoints.save(step, state)

    assert checkpoints.best is not None  # each epoch has saved a checkpoint with its accuracy
    fabric.load(checkpoints.best, {"model": model}, strict=False)
    if fabric.is_global_zero:
        shutil.rmtree(f"{FOLDER}/model", ignore_errors=True)  # of an earlier start
    fabric.barrier()
    fabric.save_pretrained(model, f"{FOLDER}/model")


if __name__ == "__main__":
    main()
