#!/usr/bin/env bash
# Says one chat turn and prints the answer as it comes; the receipt goes to stderr.
#
#   say.sh TEXT [PARENT] [SAVE_AS]
#
# TEXT      what the user says
# PARENT    id of the snapshot to go on from; "" begins a new conversation
# SAVE_AS   id under which the conversation so far is kept
#
# KVFORK is the server's address, 127.0.0.1:50051 if unset. Exits as grpcurl does: 0, or 64 + the status code.
set -euo pipefail

if [ $# -lt 1 ] || [ $# -gt 3 ]; then
  sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi

# Python writes the JSON, so that TEXT may hold quotes and newlines. Greedy, so that a run can be repeated.
request='
import json, sys

text, parent, save_as = (*sys.argv[1:], "", "")[:3]
turn = {"messages": [{"role": "ROLE_USER", "parts": [{"text": text}]}]}
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

python3 -c "$request" "$@" |
  grpcurl -plaintext -d @ "${KVFORK:-127.0.0.1:50051}" kvfork.v1.InferenceService/Generate |
  python3 -c "$show"
