"""The tokenizer of a run: read or trained, and kept in the run's folder in Hugging Face's format.

Token ids come from the `tokenizers` library alone, without special tokens: begin- and end-of-
document ids are added where rows are cut, so that there is exactly one of each whatever the
tokenizer's own post-processor would add (google/tunix#822, jingyaogong/minimind#185).

`text_tokenizer` is the value that all else uses, `build` makes one of a backend, `read` and `train`
are where backends come from, and `choose` says which one a run takes.
"""

from training.data.tokenizer.choose import load_tokenizer
from training.data.tokenizer.read import read_tokenizer
from training.data.tokenizer.text_tokenizer import TextTokenizer
from training.data.tokenizer.train import train_tokenizer

__all__ = ["TextTokenizer", "load_tokenizer", "read_tokenizer", "train_tokenizer"]
