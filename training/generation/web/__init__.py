"""The server's HTTP side: OpenAI's endpoints, Megatron's own, and what guards them.

Owns requests and responses as clients know them. Hands token ids and a sampling rule to
`training.generation.service`, and gets tokens back as they come; knows nothing of the model. Start
reading at app.py, then completions.py.

    app.py           which path is answered by what, and the guard before all of them
    completions.py   POST /v1/completions          chat.py     POST /v1/chat/completions
    megatron_api.py  PUT /api of Megatron-LM
    bodies.py        what the endpoints have in common: a body's fields, checked one by one, become
                     rows for the engine; the texts of one response while they grow
"""
