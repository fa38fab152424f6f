"""A request for every door of the proxy, with most of what a door takes."""

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
VALID = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "add"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "add", "description": "x", "parameters": SCHEMA},
            }
        ],
        "tool_choice": "auto",
        "n": 2,
        "stream": False,
        "stream_options": {"include_usage": True},
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 3,
        "stop": ["END"],
        "max_completion_tokens": 9,
        "logprobs": True,
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "add",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
        "tool_choice": "auto",
        "stream": False,
        "max_output_tokens": 9,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
    },
    "/v1/messages": {
        "model": "m",
        "system": [{"type": "text", "text": "add"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "so"},
                    {"type": "tool_result", "tool_use_id": "c1", "content": "3"},
                ],
            },
        ],
        "tools": [{"name": "add", "description": "x", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 9,
        "stop_sequences": ["END"],
        "stream": False,
        "temperature": 1.0,
        "top_k": -1,
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u"},
    },
}
