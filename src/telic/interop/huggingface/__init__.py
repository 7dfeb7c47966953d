"""Pretrained models in the files of Hugging Face: read and written without torch or transformers."""

from telic.interop.huggingface.folder import load_huggingface, save_huggingface

__all__ = ["load_huggingface", "save_huggingface"]
