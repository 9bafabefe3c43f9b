"""A server that speaks OpenAI's protocol (the extra `serve`): `python -m landmark.serving MODEL`, or `app.make_app`."""
