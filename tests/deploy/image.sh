#!/usr/bin/env bash
# Starts the image as deploy/ does, not root and with a root file system that it cannot write: image.sh gpuinfer:cpu
set -euo pipefail
image=$1
rights=(--read-only --cap-drop ALL --security-opt no-new-privileges --tmpfs /tmp --tmpfs /home/gpuinfer:uid=10001,gid=10001)
docker run --rm "${rights[@]}" "$image" --version
[ "$(docker run --rm --entrypoint id "$image" -u)" = 10001 ]
server=$(docker run --detach "${rights[@]}" "$image" serve --model tiny --host 0.0.0.0 --insecure)
trap 'docker rm --force "$server" >/dev/null' EXIT
for _ in $(seq 120); do
    case $(docker inspect --format '{{.State.Status}} {{.State.Health.Status}}' "$server") in
        "running healthy") break ;;
        running*) sleep 1 ;;
        *) break ;;
    esac
done
[ "$(docker inspect --format '{{.State.Health.Status}}' "$server")" = healthy ] || { docker logs "$server"; exit 1; }
docker stop --time 60 "$server" >/dev/null
[ "$(docker inspect --format '{{.State.ExitCode}}' "$server")" = 0 ]
echo "image: $image starts, is healthy, and ends when it is asked to"
