# The command `landmark`. With `docker run --gpus all` on a GPU; on a CPU an image of torch's CPU wheels is smaller: give their
# index by `docker build --build-arg PIP_EXTRA_INDEX_URL=…`.
FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY landmark landmark
COPY conf conf
COPY experiments experiments
RUN pip install --no-cache-dir -c constraints.txt '.[hf,faiss]'
WORKDIR /work
ENTRYPOINT ["landmark"]
