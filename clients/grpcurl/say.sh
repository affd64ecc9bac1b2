#!/usr/bin/env bash
# Says one chat turn and prints the answer as it comes; the receipt goes to stderr.
#
#   say.sh [-i FILE]... TEXT [PARENT] [SAVE_AS]
#
# FILE      a picture that comes before the text: PNG, JPEG or WebP, for a model that sees images
# TEXT      what the user says
# PARENT    id of the snapshot to go on from; "" begins a new conversation
# SAVE_AS   id under which the conversation so far is kept
#
# KVFORK is the server's address, 127.0.0.1:50051 if unset. Exits as grpcurl does: 0, or 64 + the status code.
set -euo pipefail

usage() {
  sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

files=()
while getopts i: option; do
  case $option in
    i) files+=("$OPTARG") ;;
    *) usage ;;
  esac
done
shift $((OPTIND - 1))
if [ $# -lt 1 ] || [ $# -gt 3 ]; then usage; fi

# Python writes the JSON, so that TEXT may hold quotes and newlines, and a file any bytes: in JSON they are base64.
# Greedy, so that a run can be repeated.
request='
import base64, json, pathlib, sys

count, *rest = sys.argv[1:]
files, rest = rest[: int(count)], rest[int(count) :]
text, parent, save_as = (*rest, "", "")[:3]
pictures = [base64.b64encode(pathlib.Path(file).read_bytes()).decode() for file in files]
parts = [*({"image": {"data": data}} for data in pictures), {"text": text}]
turn = {"messages": [{"role": "ROLE_USER", "parts": parts}]}
call = {"input": {"chat": turn}, "sampling": {"temperature": 0}}
if parent:
    call["parent"] = f"snapshots/{parent}"
if save_as:
    call["save"] = {"snapshot_id": save_as}
print(json.dumps(call))
'

# A message ends with the first "}" in the first column. Keys are folded: their case depends on server and tool.
show='
import json, sys

def folded(pairs):
    return {key.replace("_", "").lower(): value for key, value in pairs}

lines = ""
for line in sys.stdin:
    lines += line
    if line.rstrip() != "}":
        continue
    event, lines = json.loads(lines, object_pairs_hook=folded), ""
    if "delta" in event:
        print(event["delta"].get("text", ""), end="", flush=True)
    elif "finished" in event:
        usage = event["finished"]["usage"]
        print()
        told = ", ".join("{} {}".format(usage.get(kind + "tokens", 0), kind) for kind in ("cached", "recomputed", "new"))
        print("prompt tokens:", told, file=sys.stderr)
        if "saveerrorreason" in event["finished"]:
            print("not kept:", event["finished"]["saveerrorreason"], file=sys.stderr)
'

python3 -c "$request" "${#files[@]}" ${files[@]+"${files[@]}"} "$@" |
  grpcurl -plaintext -d @ "${KVFORK:-127.0.0.1:50051}" kvfork.v1.InferenceService/Generate |
  python3 -c "$show"
