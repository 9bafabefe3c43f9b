"""A server of OpenAI's protocol (the extra `serve`): `python -m landmark.reading.serving MODEL`, or `app.make_app`."""
