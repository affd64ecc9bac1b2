"""Chat templates of the shapes that models ship, cut down to what decides whether turns can be appended."""

# SmolLM2: a default system turn where none is given.
SMOLLM2 = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Llama 3: BOS, a header of two tokens, contents trimmed, nothing behind the closing token.
LLAMA3 = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# Gemma: the assistant is "model", roles must alternate, no system turn.
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# Gemma 3: the system message becomes the beginning of the first user turn.
GEMMA3 = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{% set lead = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set lead = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + (lead if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# Qwen 3: reasoning is cut from turns before the last user message; a last answer without any gets an empty block.
QWEN3 = (
    "{% set ns = namespace(last_user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n')"
    " if '</think>' in m.content else '' %}"
    "{% if loop.index0 > ns.last_user and (loop.last or thought) %}"
    "{{ '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content }}"
    "{% else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)

# A thinking-only model: the generation prompt opens the reasoning.
QWEN3_THINKING = QWEN3.replace(
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking",
    "{{ '<|im_start|>assistant\n<think>\n' }}{% if enable_thinking",
)

# Harmony (gpt-oss): answers have a channel, and a last answer closes with another token.
HARMONY = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{% if loop.last and not add_generation_prompt %}{{ '<|return|>' }}{% else %}{{ '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

# Mistral: the question's closer opens the answer; there is no generation prompt and no system turn.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

# Mistral's later ones put the system message into the last user turn, wherever that is.
MOVES_SYSTEM = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set lead = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set lead = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + (lead if loop.last else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)

MOVES_USER_MARKER = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% set later = messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list %}"
    "{% if m.role == 'user' and not later %}{{ ' /latest' }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MOVES_ANSWER_MARKER = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '(latest) ' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Not just an empty block less: earlier answers get a text of their own.
MARKS_EARLIER_ANSWERS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ '<think></think>' if loop.last else '(earlier) ' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MOVES_CLOSER = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + ('<|endoftext|>' if loop.last else '<|im_end|>') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# DeepSeek's shape: system text bare, user turns without a closer.
NO_USER_CLOSER = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<|start|>' + m.content }}"
    "{% else %}{{ '<|message|>' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|message|>' }}{% endif %}"
)

# Alpaca's shape: no special token in it at all.
PLAIN_TEXT = (
    "{% for m in messages %}"
    "{{ ('### Response:\n' if m.role == 'assistant' else '### Instruction:\n') + m.content + '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)

# Vicuna's shape: the end token is written only once another turn follows.
LATE_END_TOKEN = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
    "{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content }}{% if not loop.last %}{{ eos_token }}{% endif %}"
    "{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

# Lines without any special token, whose header ends as a turn does.
PLAIN_LINES = (
    "{% for m in messages %}{{ m.role + ':\n' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)

# Llama 3.1's habit: tools are told in the first user message.
TOOLS_IN_FIRST_USER = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'user' and messages[:loop.index0] | selectattr('role', 'equalto', 'user') | list | length == 0"
    " and facts is defined %}{{ facts + '\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

REPEATS_SYSTEM = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% if m.role == 'user' and messages[0].role == 'system' %}{{ ' (' + messages[0].content + ')' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HEADER_LOOKS_AHEAD = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}"
    "{% if not loop.last and messages[loop.index0 + 1].role == 'tool' %}{{ ' calling' }}{% endif %}"
    "{{ '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CLOSER_LOOKS_AHEAD = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% if not loop.last and messages[loop.index0 + 1].role == 'tool' %}{{ '<|endoftext|>' }}"
    "{% else %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

PROMPT_CHANGES_USER = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '(now) ' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

DROPS_USER = (
    "{% for m in messages if m.role != 'user' %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

DROPS_LATER_TURNS = (
    "{% for m in messages[:3] %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

NO_ROLES = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"

ONE_HEADER_FOR_ALL = (
    "{% for m in messages %}{{ '<|start|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>' }}{% endif %}"
)
