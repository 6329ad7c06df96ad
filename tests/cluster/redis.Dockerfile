# Redis for the tests' cluster, which reaches no image registry: Debian's package.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/* \
 && mkdir -p /data && chown 999:999 /data
WORKDIR /data
