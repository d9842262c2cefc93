"""Greedy text from one engine, as JSON on the last line of standard output.

    PYTHON scripts/_engines.py ENGINE MODEL NEW_TOKENS PROMPT

MODEL is a Hugging Face folder, for llama.cpp a GGUF file. Runs in whatever Python environment holds
the engine, so it imports nothing of this project. Keys: version, and text, or tokens and logprobs
(natural logarithms of the probabilities of the chosen tokens); transformers also tells the words of
the tokens and the margins, by which the best log-probability exceeds the next.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def run_transformers(folder: str, new_tokens: int, prompt: str) -> dict[str, Any]:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids_BL = torch.tensor([tokenizer(prompt)["input_ids"]])
    with torch.no_grad():
        out = model.generate(
            ids_BL,
            attention_mask=torch.ones_like(ids_BL),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = out.sequences[0, ids_BL.shape[1] :].tolist()
    steps = [logits[0].float().log_softmax(-1) for logits in out.logits]
    logprobs = [step[token].item() for step, token in zip(steps, tokens)]
    return {
        "version": transformers.__version__,
        "tokens": tokens,
        "logprobs": logprobs,
        "margins": [(top[0] - top[1]).item() for top in (step.topk(2).values for step in steps)],
        "words": [tokenizer.decode([token]) for token in tokens],
    }


def run_vllm(folder: str, new_tokens: int, prompt: str) -> dict[str, Any]:
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    import vllm

    model = vllm.LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=128)
    settings = vllm.SamplingParams(
        temperature=0, max_tokens=new_tokens, logprobs=1, ignore_eos=True
    )
    out = model.generate([prompt], settings, use_tqdm=False)[0].outputs[0]
    tokens = list(out.token_ids)
    logprobs = [step[token].logprob for step, token in zip(out.logprobs, tokens)]
    return {"version": vllm.__version__, "tokens": tokens, "logprobs": logprobs}


def run_llama_cpp(file: str, new_tokens: int, prompt: str) -> dict[str, Any]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx = 128
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    # the KV cache in fp32, as transformers has it
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    request = {
        "prompt": prompt,
        "n_predict": new_tokens,
        "temperature": 0,
        "n_probs": 1,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    out = xllamacpp.Server(params).handle_completions(request)
    if isinstance(out, str | bytes):
        out = json.loads(out)
    if "choices" in out:
        steps = out["choices"][0]["logprobs"]["content"]
    else:
        steps = out["completion_probabilities"]
    return {
        "version": xllamacpp.__version__,
        "tokens": [step["id"] for step in steps],
        "logprobs": [step["logprob"] for step in steps],
    }


def run_mistral_rs(folder: str, new_tokens: int, prompt: str) -> dict[str, Any]:
    from importlib.metadata import version

    from mistralrs import CompletionRequest, ModelDType, Runner, Which

    runner = Runner(which=Which.Plain(model_id=folder, dtype=ModelDType.F32), token_source="none")
    out = runner.send_completion_request(
        CompletionRequest(
            prompt=prompt, model="default", max_tokens=new_tokens, temperature=0.0, ignore_eos=True
        )
    )
    return {"version": version("mistralrs"), "text": out.choices[0].text}


RUNNERS = {
    "transformers": run_transformers,
    "vLLM": run_vllm,
    "llama.cpp": run_llama_cpp,
    "mistral.rs": run_mistral_rs,
}

if __name__ == "__main__":
    print()
    print(json.dumps(RUNNERS[sys.argv[1]](sys.argv[2], int(sys.argv[3]), sys.argv[4])), flush=True)
    os._exit(0)  # engines' own threads may outlive them
