"""An agent with a tool, in OpenAI's client and in Anthropic's, trained as it stands.

    megarl train configs/tool_agent.yaml
    megarl train configs/tool_agent.yaml trial_name=anthropic \\
        rollout.workflow_options.agent=examples.tool_agent:AnthropicAgent

The task is a sum that a small model cannot do in its head. It may ask the calculator:

    user       What is 47 * 86?
    assistant  <tool_call>{"name": "calculator", "arguments": {"expression": "47 * 86"}}</tool_call>
    tool       4042
    assistant  The answer is 4042.

Nothing here knows of the trainer: an agent gets a row, and where to find its model. What it
returns is its reward. The base model guesses more often than it asks; it learns to ask.
"""

import json
import operator
import random
import re

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

NAME = "calculator"
DESCRIPTION = "Works out two numbers with + - or * between them."
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXPRESSION = re.compile(r"(-?\d{1,9}) ([-+*]) (-?\d{1,9})")
ANSWER = re.compile(r"The answer is (-?\d+)\.")


def problems(size, seed):
    """Rows for training: a user's question, and the answer that the reward reads."""
    rng = random.Random(seed)
    rows = []
    for _ in range(size):
        sign = rng.choice(list(OPERATORS))
        expression = f"{rng.randint(10, 99)} {sign} {rng.randint(10, 99)}"
        question = {"role": "user", "content": f"What is {expression}?"}
        rows.append({"messages": [question], "answer": calculator(expression)})
    return rows


def calculator(expression):
    """The tool. What is wrong is told to the model, which may try again."""
    parts = EXPRESSION.fullmatch(expression) if isinstance(expression, str) else None
    if parts is None:
        return "error: expected two numbers with + - or * between them"
    a, sign, b = parts.groups()
    return str(OPERATORS[sign](int(a), int(b)))


def use_tool(name, arguments):
    """What the model reads after a call; `arguments` are whatever it wrote in the call."""
    if name != NAME or not isinstance(arguments, dict) or set(arguments) != {"expression"}:
        return f"error: there is only {NAME}, with an expression"
    return calculator(arguments["expression"])


def reward(text, answer):
    """1 if the last answer says the right number, else 0. A call alone is worth nothing."""
    said = ANSWER.fullmatch((text or "").strip())
    return float(said is not None and said.group(1) == answer)


class OpenAIAgent:
    """Chat completions with `tools=`, and the results as messages of role tool."""

    def __init__(self, max_turns=3):
        self.max_turns = max_turns

    async def run(self, data, base_url, api_key, http_client):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        function = {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}
        tools = [{"type": "function", "function": function}]
        messages = list(data["messages"])
        for _ in range(self.max_turns):
            completion = await client.chat.completions.create(
                model="policy", messages=messages, tools=tools
            )
            answer = completion.choices[0].message
            if not answer.tool_calls:
                return reward(answer.content, data["answer"])
            messages.append(answer)
            for call in answer.tool_calls:
                result = use_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return 0.0


class AnthropicAgent:
    """Messages with `tools=`: blocks of tool_use, answered by blocks of tool_result."""

    def __init__(self, max_turns=3):
        self.max_turns = max_turns

    async def run(self, data, base_url, api_key, http_client):
        client = AsyncAnthropic(base_url=base_url, api_key=api_key, http_client=http_client)
        tools = [{"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}]
        messages = list(data["messages"])
        for _ in range(self.max_turns):
            answer = await client.messages.create(
                model="policy", messages=messages, tools=tools, max_tokens=256
            )
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                text = "".join(block.text for block in answer.content)
                return reward(text, data["answer"])
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": use_tool(call.name, call.input),
                }
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
        return 0.0
