"""Tiny tokenizers with the special tokens and chat templates of model families.

The templates are ours: what is public about each family's format, and no more than the messages
that the tests have. The package `renderers`, which nobody here wrote, has to agree with each.
"""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

QWEN3 = """\
{%- set header %}
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{%- endset %}
{%- set footer %}

</tools>

For each function call, return a json object with function name and arguments \
within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>
{%- endset %}
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- header }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- footer + '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.user and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + m.content.lstrip('\n') }}
{%- else %}{{- m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or m.content %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}
{%- endif %}{%- endif %}"""

QWEN35 = """\
{%- set instructions %}


If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block \
must be nested within <tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the \
function call, but NOT after
- If there is no function call available, answer the question like normal with your current \
knowledge and do not tell the user about function calls
</IMPORTANT>
{%- endset %}
{%- set system = (messages[0].content | trim) if messages[0].role == 'system' else '' %}
{%- if tools %}
{{- '<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools>' + instructions + ('\n\n' + system if system else '') + '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(user=messages | length) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- set content = m.content | trim %}
{%- if m.role == 'user' %}
{{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.user %}
{{- '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' + content }}
{%- else %}{{- content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first %}{{- '\n' }}{%- elif content %}{{- '\n\n' }}{%- endif %}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments.items() %}
{%- set text = (value | tojson) if value is mapping or (value is sequence and value is not string)
    else (value | string) %}
{{- '<parameter=' + key + '>\n' + text + '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}
{%- else %}{{- '<think>\n' }}{%- endif %}{%- endif %}"""

DEEPSEEK_V3 = """\
{{- '<｜begin▁of▁sentence｜>' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{%- if loop.previtem.role != 'tool' %}{{- '<｜Assistant｜>' }}{%- endif %}
{{- m.content }}
{%- if m.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
{{- (call.function.arguments | tojson) + '\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{- '<｜tool▁outputs▁begin｜>' }}{%- endif %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<｜Assistant｜>' }}{%- endif %}"""

GLM45 = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}
{{- '<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.' }}
{{- '\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\n' }}{%- endfor %}
{{- '</tools>\n\nFor each function call, output the function name and arguments within the ' }}
{{- 'following XML format:\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n' }}
{{- '<arg_value>{arg-value-1}</arg_value>\n<arg_key>{arg-key-2}</arg_key>\n' }}
{{- '<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>' }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role in ['system', 'user'] %}{{- '<|' + m.role + '|>\n' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant|>\n<think>' }}
{%- if loop.index0 > last.user and m.reasoning_content %}{{- m.reasoning_content.strip() }}
{%- endif %}
{{- '</think>' }}
{%- if m.content.strip() %}{{- '\n' + m.content.strip() }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{%- if loop.first or not m.content.strip() %}{{- '\n' }}{%- endif %}
{{- '<tool_call>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}
{{- (value if value is string else (value | tojson)) + '</arg_value>\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

KIMI_K2 = """\
{%- if tools %}
{{- '<|im_system|>tool_declare<|im_middle|>' }}
{{- (tools | tojson(separators=(',', ':'), sort_keys=True)) + '<|im_end|>' }}
{%- endif %}
{%- if messages[0].role != 'system' %}
{{- '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.' }}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_assistant|>assistant<|im_middle|>' + m.content }}
{%- if m.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{{- (call.function.arguments | tojson) + '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{{- '<|im_system|>' + (m.name or 'tool') + '<|im_middle|>## Return of ' + m.tool_call_id + '\n' }}
{{- m.content }}
{%- else %}
{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- set system = (messages[0].content | trim) if messages[0].role == 'system' else '' %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + date_string + '\n\n' + system }}
{{- '<|eot_id|>' }}
{%- set first = 1 if messages[0].role == 'system' else 0 %}
{%- for m in messages[first:] %}
{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- if tools and loop.first %}
{{- 'Given the following functions, please respond with a JSON for a function call with its ' }}
{{- 'proper arguments that best answers the given prompt.\n\nRespond in the format ' }}
{{- '{"name": function name, "parameters": dictionary of argument name and its value}.' }}
{{- 'Do not use variables.\n\n' }}
{%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\n\n' }}{%- endfor %}
{%- endif %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{- raise_exception('one tool call a message') }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- elif m.role == 'tool' %}{{- m.content | tojson }}
{%- else %}{{- m.content | trim }}{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

DEEPSEEK_R1 = DEEPSEEK_V3.replace(
    "{{- m.content }}\n{%- if m.tool_calls",
    "{{- m.content.split('</think>')[-1] }}\n{%- if m.tool_calls",
).replace(
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<｜Assistant｜>' }}{%- endif %}",
    "{%- if add_generation_prompt %}{%- if messages[-1].role != 'tool' %}{{- '<｜Assistant｜>' }}"
    "{%- endif %}{{- '<think>\\n' }}{%- endif %}",
)

_QWEN = "<|endoftext|> <|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> "
    "<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
_GLM = (
    "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> "
    "<tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value>"
)
_KIMI = (
    "[EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> "
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
    "<|tool_call_argument_begin|> <|tool_call_end|>"
)
_LLAMA = (
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|>"
)
# Family -> template, its tokens, the end-of-sequence token.
FAMILIES = {
    "chatml": (CHATML, _QWEN, "<|im_end|>"),
    "qwen3": (QWEN3, _QWEN, "<|im_end|>"),
    "qwen3.5": (
        QWEN35,
        _QWEN + " <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>",
        "<|im_end|>",
    ),
    "deepseek-v3": (DEEPSEEK_V3, _DEEPSEEK, "<｜end▁of▁sentence｜>"),
    "deepseek-r1": (DEEPSEEK_R1, _DEEPSEEK, "<｜end▁of▁sentence｜>"),
    "glm-4.5": (GLM45, _GLM, "<|endoftext|>"),
    "kimi-k2": (KIMI_K2, _KIMI, "<|im_end|>"),
    "llama-3": (LLAMA3, _LLAMA, "<|eot_id|>"),
}
# How GPT-4's tokenizer and most since cut text before merges.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def tokenizer_of(family: str, template: str = "") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a few merges; `template` takes the place of the family's."""
    own, tokens, eos = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [text for text, _, _ in FAMILIES.values()] + ["\n\n \n"] * 9, trainer
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=not token.startswith(("<t", "</"))) for token in tokens.split()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        chat_template=template or own,
    )
