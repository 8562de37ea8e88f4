# A worker image. Build: docker build -t pagemill .
# With a CPU build of torch, which is gigabytes smaller, see README, "Which torch":
#   docker build -t pagemill --build-arg PIP_ARGS="--extra-index-url URL-OF-THE-CPU-INDEX" .

FROM python:3.12-slim AS build
ARG PIP_ARGS=""
WORKDIR /src
RUN python -m venv /opt/pagemill
# The dependencies first: they change less often than the code, and their layer is the large one.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN python -c "import tomllib; print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))" > requirements.txt \
    && /opt/pagemill/bin/pip install --no-cache-dir --disable-pip-version-check $PIP_ARGS -c constraints.txt -r requirements.txt
COPY scheduler scheduler
COPY kernels kernels
COPY model model
COPY worker worker
COPY ops ops
RUN /opt/pagemill/bin/pip install --no-cache-dir --disable-pip-version-check $PIP_ARGS -c constraints.txt .

FROM python:3.12-slim
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin pagemill \
    && install -d -o pagemill -g pagemill /var/lib/pagemill /var/cache/pagemill
COPY --from=build /opt/pagemill /opt/pagemill
ENV PATH=/opt/pagemill/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PAGEMILL_DATA_DIR=/var/lib/pagemill \
    PAGEMILL_CACHE_DIR=/var/cache/pagemill \
    PAGEMILL_METRICS_HOST=0.0.0.0 \
    PAGEMILL_METRICS_PORT=9090 \
    PAGEMILL_LOG_FORMAT=json
USER pagemill
WORKDIR /var/lib/pagemill
VOLUME ["/var/lib/pagemill", "/var/cache/pagemill"]
EXPOSE 9090
# The first start fetches and converts the demo model, which takes minutes on a slow line.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9090/readyz', timeout=4)"]
ENTRYPOINT ["pagemill"]
CMD ["serve"]
