"""OpenAI- and Anthropic-compatible endpoints whose completions are training data.

    agent --HTTP--> server -> openai_chat | openai_responses | anthropic_messages
                                  -> generate -> engine.agenerate
                                  -> session (what was sampled) -> export -> trajectory

An agent changes its base_url and api_key, nothing else. See `server.AgentProxy`.
"""
