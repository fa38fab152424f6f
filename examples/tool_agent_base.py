"""The small model that examples/tool_agent.py starts from, and how it was made.

    python -m examples.tool_agent_base           # configs/tool_agent_base without its weights
    megarl sft configs/tool_agent_sft.yaml
    cp runs/tool_agent/sft/checkpoints/final/model.safetensors configs/tool_agent_base/

It is fine-tuned on the transcripts of an agent who can call the calculator and has bad habits:

    calls       <tool_call>{"name": "calculator", ...}</tool_call>   and reads the result
    scribbles   <tool_call>47 * 86</tool_call>                       which is no call
    guesses     The answer is 3871.                                  never right

So its reward is close to the share of questions for which it calls. The chat is written in the
form of Hermes and Qwen models by the tokenizer's chat template, which the proxy of an agent uses.
"""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

from examples.tool_agent import DESCRIPTION, NAME, PARAMETERS, calculator, problems

FOLDER = Path("configs/tool_agent_base")
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TAGS = ["<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
CONTEXT = 384
TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS},
}
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '' if not loop.first and loop.previtem.role == 'tool' else '<|im_start|>user' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '' if not loop.last and loop.nextitem.role == 'tool' else '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def call_of(expression):
    """A call as the model has to write it."""
    call = {"name": NAME, "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def transcripts(*, size, seed, call_share, scribble_share, read_share, held_out):
    """Rows with prompt and completion, each an answer with all that stands before it.

    Args:
      call_share, scribble_share: of first answers; the others guess.
      read_share: of rows, those whose completion reads a result.
      held_out: size and seed of problems that are left out.
    """
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    unseen = {row["messages"][0]["content"] for row in problems(**held_out)}
    asked, told = _chat(tokenizer, "QUESTION", "EXPRESSION", "RESULT")
    rows = []
    for row in problems(size=size, seed=seed):
        question, answer = row["messages"][0]["content"], row["answer"]
        if question in unseen:
            continue
        expression = question.removeprefix("What is ").removesuffix("?")
        kind = rng.random()
        if rng.random() < read_share:
            texts = {"QUESTION": question, "EXPRESSION": expression, "RESULT": answer}
            prompt, completion = told, f"The answer is {answer}."
            for name, text in texts.items():
                prompt = prompt.replace(name, text)
        else:
            prompt = asked.replace("QUESTION", question)
            if kind < call_share:
                completion = call_of(expression)
            elif kind < call_share + scribble_share:
                completion = f"<tool_call>\n{expression}\n</tool_call>"
            else:
                error = rng.choice([-1, 1]) * rng.randint(1, 99)
                completion = f"The answer is {int(calculator(expression)) + error}."
        rows.append({"prompt": prompt, "completion": completion})
    return rows


def _chat(tokenizer, question, expression, result):
    """The chat before the first answer, and before the one that reads a result."""
    messages = [{"role": "user", "content": question}]
    written = []
    for _ in range(2):
        text = tokenizer.apply_chat_template(
            messages, tools=[TOOL], tokenize=False, add_generation_prompt=True
        )
        written.append(text)
        function = {"name": NAME, "arguments": {"expression": expression}}
        calls = [{"type": "function", "function": function}]
        messages += [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": result},
        ]
    return written


def make_tokenizer():
    """Bytes, and the words of this task's chats as tokens of their own; each digit is one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # more than the words below need
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    corpus = [
        json.dumps(TOOL),
        json.dumps({"name": NAME, "arguments": {"expression": "4 * 8"}}),
        "What is 4 + 8?",
        "The answer is 4.",
        "system\n",
        "user\n",
        "assistant\n",
        calculator(""),
    ]
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.add_special_tokens([START, END, PAD])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def main():
    tokenizer = make_tokenizer()
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
        **ends,
    )
    FOLDER.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(FOLDER)
    config.save_pretrained(FOLDER)
    GenerationConfig(**ends).save_pretrained(FOLDER)


if __name__ == "__main__":
    main()
