"""Chat templates in the manner of families that people run, and conversations to put into them.

Each was written for these tests, after what its family's template does: how it opens turns, where the system prompt
goes, how tools, calls and results are spelled, which switches it reads.
"""

from __future__ import annotations

from typing import Any

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

CHATML = """{% for m in messages %}
{% if loop.first and m.role != 'system' %}
{{ '<|im_start|>system\nBe of use.<|im_end|>\n' }}
{% endif %}
{{ '<|im_start|>' ~ m['role'] ~ '\n' ~ m['content'] ~ '<|im_end|>' ~ '\n' }}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- set date = date_string if date_string is defined else strftime_now('%d %b %Y') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set first = '' %}
{%- endif %}
{{- '<|head|>system<|/head|>\n\n' + 'Today is ' + date + '\n' }}
{%- if tools is not none %}
    {{- 'Functions:\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}
{%- endif %}
{{- first + '<|eot|>' }}
{%- for message in messages %}
    {%- if message.role not in ('tool', 'ipython') and 'tool_calls' not in message %}
        {{- '<|head|>' + message['role'] + '<|/head|>\n\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|head|>assistant<|/head|>\n\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + call.arguments | tojson + '}<|eot|>' }}
    {%- else %}
        {{- '<|head|>ipython<|/head|>\n\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}
"""

QWEN = """{%- macro said(content) %}
    {%- if content is string %}{{ content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}{% if part.type == 'text' or 'text' in part %}{{ part.text }}{% endif %}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ said(messages[0].content) + '\n\n' }}{% endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + said(messages[0].content) + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}{% set ns.found = true %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = said(message.content) %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '\n<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

MISTRAL = """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {%- if loop.last and system is defined %}{{ '[INST]' + system + '\n\n' + m.content + '[/INST]' }}
        {%- else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}
    {%- elif m.tool_calls is defined and m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('ids have 9 letters') }}
            {%- endif %}
            {{- call.function | tojson }}{{ ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}
        {%- set content = m.content.content if m.content.content is defined else m.content %}
        {{- '[TOOL_RESULTS]{"content": ' + content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool follow the system prompt, not ' + m.role) }}
    {%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = (messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'][0]['text'])
        + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<image>' }}{%- else -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception('what is that?') }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

HERMES = """{%- macro kind(spec) -%}
    {%- set names = {'string': 'str', 'number': 'float', 'integer': 'int', 'boolean': 'bool', 'array': 'list'} -%}
    {%- if spec.type is string and spec.type in names -%}{{ names[spec.type] }}
    {%- elif spec.type is iterable and spec.type is not string -%}
        {%- set parts = [] -%}
        {%- for one in spec.type -%}{%- set _ = namespace() -%}{{ kind({'type': one}) }}{{ '|' if not loop.last }}
        {%- endfor -%}
    {%- else -%}Any{%- endif -%}
{%- endmacro -%}
{{ bos_token }}{{ '<|im_start|>system\n' }}
{%- for tool in (tools or []) -%}
    {%- set f = tool.function if tool.function is defined else tool -%}
    {{ f.name + '(' }}
    {%- for name, spec in f.parameters.properties.items() -%}
        {{ name + ': ' + kind(spec) }}{{ ', ' if not loop.last }}
    {%- endfor -%}
    {{ ') - ' + f.description + '\n' }}
    {{- f | tojson(sort_keys=true, separators=(',', ':')) + '\n' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- for m in messages -%}
    {%- if m.role == 'system' and loop.first -%}{% continue %}{%- endif -%}
    {%- if loop.index > 40 -%}{% break %}{%- endif -%}
    {{ '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' -%}
        {% generation %}
            {%- if m.content -%}{{ m.content }}{%- endif -%}
            {%- for call in m.tool_calls or [] -%}
                {{ '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
                {{- '</tool_call>' }}
            {%- endfor -%}
        {% endgeneration %}
    {%- elif m.role == 'tool' -%}
        {{ '<tool_response>' }}{{ {'name': m.name, 'content': m.content} | tojson }}{{ '</tool_response>' }}
    {%- else -%}
        {{ m.content }}
    {%- endif -%}
    {{ '<|im_end|>\n' }}
{%- endfor -%}
{%- for d in documents or [] -%}{{ '[' ~ loop.index ~ '] ' ~ d.title ~ ': ' ~ d.text ~ '\n' }}{%- endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}
{%- if reasoning_effort is defined %}{{ 'effort: ' ~ reasoning_effort }}{% endif -%}"""

PARTS_ONLY = """{% for m in messages %}{{ '<' + m.role + '>' }}{% for p in m.content if p.type == 'text' %}{{ p.text }}
{% endfor %}{% endfor %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "hermes": HERMES,
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather of a place, in "degrees" <C>.',
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Ort, 場所"},
                "days": {"type": ["integer", "null"], "description": "how many"},
            },
            "required": ["place"],
        },
    },
}
CALL = {
    "id": "abc123XYZ",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"place": "Zürich <a&b>", "days": 2}},
}
SYSTEM = {"role": "system", "content": "  Be brief, <b>. "}
USER = {"role": "user", "content": " How is it in Zürich? \n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nWarm.  "}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abc123XYZ", "name": "get_weather", "content": "22.0"}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "日本 and 'quotes'?"}],
    "ends with the assistant": [USER, ANSWER],
    "tool call": [SYSTEM, USER, CALLING],
    "tool result": [USER, CALLING, RESULT],
    "after the tool": [
        USER,
        CALLING,
        RESULT,
        {"role": "assistant", "content": "22 degrees", "reasoning": "so"},
        USER,
    ],
    "system late": [USER, ANSWER, SYSTEM, USER],
    "None beside": [{"role": "user", "content": "hi", "name": None, "tool_calls": None}],
}
