# Trains in the embedded world, on the CPU, without a network:
#     docker build -t trl-repulse . && docker run --rm --network none trl-repulse
FROM python:3.11-slim

RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY trl_repulse trl_repulse
RUN pip install --no-cache-dir . && useradd --create-home user

USER user
WORKDIR /home/user
ENV HF_HUB_OFFLINE=1
ENTRYPOINT ["trl-repulse"]
CMD ["repulse"]
