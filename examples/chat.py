"""A private chat: a small GPT-2 continues a text that its owner does not see, over three processes and mutual TLS.

    python examples/chat.py [TEXT ...]

A hospital (the answering party) trains a language model of letters on the descriptions of scikit-learn's data sets, in
the clear and alone. A reader asks it to continue texts. Reader, hospital and server are processes of their own on this
machine: the reader learns the letters, the hospital and the server learn how many were read and written.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn import datasets

from sectorch.network import save_generation
from sectorch.testing.local_network import Stage

console = Console()
PROMPT = 24
TEXTS = ("The number of patients", "mean radius of the ", "samples of three")


def corpus() -> str:
    """What scikit-learn says of its data sets."""
    loaders = (datasets.load_breast_cancer, datasets.load_diabetes, datasets.load_wine, datasets.load_iris)
    return "\n".join(str(load().DESCR) for load in loaders)


class Letters:
    """The tokenizer: a number for each letter; 0 stands where a text is padded."""

    def __init__(self, text: str):
        self._letters = ["", *sorted(set(text))]
        self._numbers = {letter: number for number, letter in enumerate(self._letters)}

    def __len__(self) -> int:
        return len(self._letters)

    def encode(self, text: str) -> list[int]:
        return [self._numbers[letter] for letter in text if letter in self._numbers]

    def decode(self, numbers: torch.Tensor) -> str:
        return "".join(self._letters[number] for number in numbers.tolist())


def prompts(texts: list[str], letters: Letters) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [texts, PROMPT], padded on the left."""
    ids, mask = torch.zeros(len(texts), PROMPT, dtype=torch.int64), torch.zeros(len(texts), PROMPT, dtype=torch.int64)
    for row, text in enumerate(texts):
        numbers = letters.encode(text)[-PROMPT:]
        ids[row, PROMPT - len(numbers) :], mask[row, PROMPT - len(numbers) :] = torch.tensor(numbers), 1
    return ids, mask


def trained(text: str, letters: Letters, steps: int, positions: int) -> transformers.GPT2LMHeadModel:
    """A GPT-2 of two layers, trained to continue the text."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(letters), n_positions=positions, n_embd=96, n_layer=2, n_head=4, bos_token_id=None,
        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model, numbers = transformers.GPT2LMHeadModel(config), torch.tensor(letters.encode(text))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in track(range(steps), "the hospital trains its model", console=console):
        places = torch.randint(0, len(numbers) - config.n_positions, (32,))
        batch = torch.stack([numbers[place : place + config.n_positions] for place in places])
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def main(steps: int = 300, tokens: int = 24) -> float:
    """Returns the share of letters that are the plain model's."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    text = corpus()
    letters, texts = Letters(text), sys.argv[1:] or list(TEXTS)
    model = trained(text, letters, steps, PROMPT + tokens)
    ids, mask = prompts(texts, letters)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)

    def write(path: Path) -> None:
        save_generation(model, [tuple(ids.shape)], tokens, path)

    written: list[str] = [""] * len(texts)
    with Stage({"hospital": write}) as stage, stage.connect("reader") as connection:
        remote = connection.model("hospital")
        start = time.perf_counter()

        def show(letter: torch.Tensor) -> None:
            for row, number in enumerate(letter):
                written[row] += letters.decode(number[None])
            console.print(f"[dim]{time.perf_counter() - start:5.1f} s[/dim]", repr(written[0]), soft_wrap=True)

        found = remote.generate(ids, attention_mask=mask, streamer=show)
        seconds = (time.perf_counter() - start) / tokens
    table = Table(title="what the reader has")
    for head in ("asked", "continued", "the plain model"):
        table.add_column(head)
    for row, prompt in enumerate(texts):
        table.add_row(repr(prompt), repr(written[row]), repr(letters.decode(expected[row, PROMPT:])))
    console.print(table)
    same = float((found == expected)[:, PROMPT:].double().mean())
    console.print(f"{same:.0%} of the letters are the plain model's; {seconds:.2f} s a letter of {len(texts)} texts")
    console.print("hospital and server saw shares of the texts, and learned their number and length; nothing else")
    return same


if __name__ == "__main__":
    main()
