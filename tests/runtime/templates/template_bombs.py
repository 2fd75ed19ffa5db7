# ruff: noqa: E501
"""Chat templates that want all of the machine's time or memory; and, run as a script, what happens to them.

Run as a script, it renders each twice: inline, as a process with an event loop does, and by a worker. It prints one
JSON line about each, and one about the memory of both processes.
"""

import contextlib
import json
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.cpu import reference_s
from treeline_runtime.templates.pool import PoolLimits, TemplatePool
from treeline_wire.chat import ChatTemplate, NeedsWorkerError, TemplateError
from treeline_wire.template_inline import MAX_INPUT_CHARS

#: The address space of a worker beyond what it starts with, and the time for one rendering there.
LIMITS = PoolLimits(seconds=0.02, memory_bytes=64 << 20, workers=1)

HELD_S = 0.02
"""Seconds of processor time after which a rendering counts as holding an event loop."""

BOMBS: dict[str, str] = {
    # loops
    "nested_loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested_filtered_loops": "{% for a in range(99999) if a < 0 %}{% for b in range(9) %}{% endfor %}{% endfor %}" * 60,
    "long_range": "{% for a in range(10**9) %}{% endfor %}",
    "range_of_ranges": "{% for a in range(99999)|map('string')|list * 99 %}{% for c in range(99999) %}{% endfor %}{% endfor %}",
    "compare_deep": "{% set ns=namespace(a=[1],b=[1]) %}{% for i in range(99) %}{% set ns.a=[ns.a,ns.a] %}{% set ns.b=[ns.b,ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "quadratic_text": "{% set ns=namespace(s='') %}{% for i in range(99999) %}{% set ns.s = ns.s ~ 'xxxxxxxxxxxxxxxxxxxxxxxxx' %}{% endfor %}",
    "printing_loop": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "literal_loop": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "literal_macro": "{% macro m() %}" + "x" * 9999 + "{% endmacro %}{% for i in range(99999) %}{% set a = m() %}{% endfor %}",
    "const_loop": "{% for i in range(99999) %}{{ '" + "x" * 9999 + "' }}{% endfor %}",
    "recursive_loop": "{% for a in [1,2] recursive %}{{ loop([1,2]) }}{% endfor %}",
    # texts
    "multiply": "{{ 'x' * 10**10 }}",
    "multiply_left": "{{ 10**9 * 'x' }}",
    "multiply_list": "{{ ([1] * 10**9)|length }}",
    "multiply_nested": "{% set a = ['x' * 1000] * 1000 %}{% set b = [a] * 1000 %}{% set c = [b] * 1000 %}{{ c }}",
    "doubling": "{% set ns=namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling_tilde": "{% set ns=namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling_set_block": "{% set ns=namespace(s='xxxx') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}",
    "doubling_macro": "{% macro d(s, n) %}{{ s }}{{ s }}{% if n %}{{ d(s ~ s, n - 1) }}{% endif %}{% endmacro %}{{ d('x', 50) }}",
    "doubling_join": "{% set ns=namespace(s='x') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s]|join %}{% endfor %}",
    "doubling_method_join": "{% set ns=namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s.join(['', ns.s, '']) %}{% endfor %}",
    "doubling_format": "{% set ns=namespace(s='x') %}{% for i in range(60) %}{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}",
    "doubling_percent": "{% set ns=namespace(s='x') %}{% for i in range(60) %}{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    "doubling_format_map": "{% set ns=namespace(s='x') %}{% for i in range(60) %}{% set ns.s = '{a}{a}'.format_map({'a': ns.s}) %}{% endfor %}",
    "doubling_replace": "{% set ns=namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
    "doubling_replace_filter": "{% set ns=namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s|replace('x', 'xx') %}{% endfor %}",
    "doubling_filter_block": "{% macro f(n) %}{% filter replace('x', 'xx') %}{% if n %}{{ f(n - 1) }}{% else %}x{% endif %}{% endfilter %}{% endmacro %}{{ f(40) }}",
    "replace_empty": "{{ ('x' * 99999).replace('', 'y' * 99999)|length }}",
    "billion_laughs": "{% set ns=namespace(a='lol') %}{% for i in range(40) %}{% set ns.a = [ns.a] * 10 %}{% endfor %}{{ ns.a }}",
    "billion_laughs_literal": "{% set ns=namespace(a='lol') %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
    "billion_laughs_tuple": "{% set ns=namespace(a='lol') %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}{{ {ns.a: 1} }}",
    "billion_laughs_dict": "{% set ns=namespace(a='lol') %}{% for i in range(60) %}{% set ns.a = {'a': ns.a, 'b': ns.a} %}{% endfor %}{{ ns.a|tojson }}",
    "billion_laughs_plus": "{% set ns=namespace(a=['lol']) %}{% for i in range(60) %}{% set ns.a = [ns.a] + [ns.a] %}{% endfor %}{{ ns.a|string }}",
    "billion_laughs_filter": "{% set ns=namespace(a='lol') %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a]|map('default')|list %}{% endfor %}{{ ns.a }}",
    "billion_laughs_dict_call": "{% set ns=namespace(a='lol') %}{% for i in range(60) %}{% set ns.a = dict(a=ns.a, b=ns.a) %}{% endfor %}{{ ns.a }}",
    "namespace_list": "{% set ns=namespace(a='x' * 999999) %}{% set l = [ns] * 9999 %}{{ l }}",
    "namespace_join": "{% set ns=namespace(a='x' * 999999) %}{{ ([ns] * 9999)|join }}",
    "namespace_percent": "{% set ns=namespace(a='x' * 999999) %}{{ '%s%s%s%s' % (ns, ns, ns, ns) }}",
    "many_big_values": "{% set l = namespace(a=[]) %}{% for i in range(9999) %}{% set l.a = l.a + ['x' * 999999] %}{% endfor %}",
    "many_slices": "{% set s = 'x' * 3000000 %}" + "".join(f"{{% set a{i} = s[{i}:] %}}" for i in range(3000)),
    "many_list_slices": "{% set s = range(30000)|list %}" + "".join(f"{{% set a{i} = s[{i}:] %}}" for i in range(5000)),
    # numbers and widths
    "power": "{{ 2 ** 100000000 }}",
    "power_tower": "{{ 9 ** (9 ** 9) }}",
    "squaring": "{% set ns=namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "ljust": "{{ 'x'.ljust(10**10)|length }}",
    "zfill": "{{ 'x'.zfill(10**10)|length }}",
    "center": "{{ 'x'|center(10**10)|length }}",
    "expandtabs": "{{ ('\\t' * 9999).expandtabs(10**8)|length }}",
    "format_width": "{{ '{:>9999999999}'.format('x')|length }}",
    "format_nested_width": "{{ '{:>{}}'.format('x', 10**10)|length }}",
    "percent_width": "{{ '%9999999999d' % 1 }}",
    "percent_star": "{{ '%*d' % (10**10, 1) }}",
    "percent_precision": "{{ '%.9999999999f' % 1 }}",
    "format_filter_width": "{{ '%9999999999d'|format(1) }}",
    "indent": "{{ ('\\n' * 9999)|indent(10**8) }}",
    "indent_text": "{{ ('\\na' * 9999)|indent('x' * 99999) }}",
    "tojson_indent": "{{ [[[]]]|tojson(indent=10**10) }}",
    "tojson_indent_text": "{{ [1,2,3]|tojson(indent='x' * 10**6) }}",
    "batch_fill": "{{ [1]|batch(10**9, 'x')|list|length }}",
    "slice": "{{ [1]|slice(10**9)|list|length }}",
    "round": "{{ 1.5|round(10**9) }}",
    "sum_lists": "{{ (range(99999)|map('string')|batch(1)|list)|sum(start=[])|length }}",
    "strftime": "{{ strftime_now('%A' * 10**6) }}",
    "hexadecimal": "{{ ('f' * 4000000)|int(base=16) // 3 }}",
    "long_division": "{{ 0x" + "f" * 120000 + " // 0x" + "e" * 60000 + " }}" * 1 + "{% for i in range(9999) %}{{ 0x" + "f" * 9999 + " // 0x" + "e" * 5000 + " > i }}{% endfor %}",
    # quadratic C functions
    "rfind": "{{ ('a' * 3999999).rfind('ab' ~ 'a' * 1999999) }}",
    "rindex": "{{ ('a' * 3999999).rindex('ab' ~ 'a' * 1999999) }}",
    "rsplit": "{{ ('a' * 3999999).rsplit('ab' ~ 'a' * 1999999)|length }}",
    "rpartition": "{{ ('a' * 3999999).rpartition('ab' ~ 'a' * 1999999)|length }}",
    "strip": "{{ ('a' * 3999999).strip('b' * 1999999 ~ 'a') }}",
    "trim": "{{ ('a' * 3999999)|trim('b' * 1999999 ~ 'a') }}",
    "equal_hashes": "{{ range(0, (2**61 - 1) * 99999, 2**61 - 1)|unique|list|length }}",
    "equal_hashes_in_dict": "{{ dict.fromkeys(range(99999)|map('string')|map('int')|map('round')|list)|length }}",
    "equal_hashes_from_text": "{{ ('2305843009213693951,4611686018427387902,6917529027641081853,' * 9999).split(',')|map('int')|unique|list|length }}",
    # recursion
    "macro_recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "macro_tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    "call_recursion": "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}",
    "block_recursion": "{% block a %}{{ self.a() }}{% endblock %}",
    "deep_nesting": "{% set ns=namespace(a=1) %}{% for i in range(9999) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a|tojson }}",
    "deep_source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long_sum": "{{ 1" + " + 1" * 50000 + " }}",
    "deep_blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "huge_source": "x" * (1 << 20),
    # found since
    "lipsum": "{{ lipsum(9999999) }}",
    "translate": "{{ ('x' * 99999).translate({120: 'y' * 99999}) }}",
    "memory_of_characters": "{{ (('xy' * 9999999)|list)|length }}",
    "memory_of_pieces": "{{ (('x ' * 9999999).split())|length }}",
    "memory_of_lines": "{{ (('\\n' * 9999999).splitlines())|length }}",
    "memory_of_batches": "{{ (('xy' * 9999999)|batch(1)|list)|length }}",
    "gigabyte_at_once": "{{ ('x' * 2**30)|length }}",
    "gigabyte_constant": "{{ 'x' * 1073741824 }}",
    "gigabyte_constant_folded": "{% if false %}{{ 'x' * 1073741824 }}{% endif %}{{ ('x' * 1073741824)|length }}",
    "gigabyte_of_wide_text": "{{ ('😀' * 2**28)|length }}",
    "gigabyte_by_ljust_filter": "{{ ('%-1073741824s'|format('x'))|length }}",
    "gigabyte_from_message": "{{ (messages[0].content * 999999999)|length }}",
    "printf_from_message": "{{ ('%' ~ messages[1].content ~ 'd') % 1 }}",
    "printf_dict": "{{ '%(a)999999999s' % {'a': 1} }}",
    "printf_many": "{{ ('%99999s' * 99999) % (range(99999)|list) }}",
    "constant_power_in_output": "{{ 7 ** 9999999 }}",
    "constant_power_in_test": "{% if 7 ** 99999999 %}x{% endif %}",
    "constant_filter": "{{ ('x' * 999999999)|upper|length }}",
    "constant_filter_chain": "{{ 'x'|center(999999999)|center(1999999999)|length }}",
    "range_product": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    "range_list_doubling": "{% set ns = namespace(a=range(99999)|list) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "map_chain": "{{ range(99999)|map('string')|map('center', 99999)|join|length }}",
    "map_json_chain": "{% set ns = namespace(s='\"') %}{% for i in range(60) %}{% set ns.s = ns.s|tojson %}{% endfor %}{{ ns.s|length }}",
    "json_chain_in_one": "{{ '\"'" + "|tojson" * 60 + " }}",
    "escape_chain": "{% set ns = namespace(s='&' * 9999) %}{% for i in range(9999) %}{% set ns.s = (ns.s|e) ~ ns.s %}{% endfor %}",
    "generator_chain": "{% set ns = namespace(g=[1]) %}{% for i in range(99999) %}{% set ns.g = ns.g|map('string') %}{% endfor %}{{ ns.g|list|length }}",
    "generator_chain_select": "{% set ns = namespace(g=[1]) %}{% for i in range(99999) %}{% set ns.g = ns.g|select %}{% endfor %}{{ ns.g|list }}",
    "generator_chain_then_more": "{% set ns = namespace(g=[1]) %}{% for i in range(90000) %}{% set ns.g = ns.g|reject('none') %}{% endfor %}{% set ns.g = 1 %}" * 20,
    "namespace_graph": "{% set ns = namespace(a=1) %}{% for i in range(60) %}{% set ns.a = [namespace(x=ns.a, y=ns.a), ns.a] %}{% endfor %}{{ ns.a|tojson }}{{ ns.a }}",
    "namespace_self": "{% set ns = namespace(l=[]) %}{% set ns.l = [ns] * 999999 %}{% set ns.m = ns.l * 99 %}{{ ns.m|string|length }}",
    "list_equal_graph": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a in [ns.b] }}",
    "list_count_graph": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ [ns.b].count(ns.a) }}",
    "list_sort_graph": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ [ns.a, ns.b]|sort|length }}",
    "tuple_hash_graph": "{% set ns = namespace(a=(1,)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}{{ {ns.a: 1}|length }}",
    "join_of_joins": "{% set s = 'x' * 9999 %}{{ (s|join(s)|join(s))|length }}",
    "join_separator": "{{ range(99999)|join('x' * 99999)|length }}",
    "join_method_separator": "{{ ('x' * 99999).join(range(99999)|map('string'))|length }}",
    "replace_chain": "{{ ('x' * 9999)" + "|replace('x', 'xxxxxxxxxxxxxxxx')" * 8 + " }}",
    "replace_method_chain": "{{ ('x' * 9999)" + ".replace('x', 'xxxxxxxxxxxxxxxx')" * 8 + " }}",
    "wordwrap": "{{ ('x ' * 9999999)|wordwrap(1)|length }}",
    "truncate": "{{ ('x' * 999999999)|truncate(999999998)|length }}",
    "title": "{{ ('x y ' * 99999999)|title|length }}",
    "urlencode": "{{ ('/é' * 99999999)|urlencode|length }}",
    "filesizeformat": "{{ (10 ** 4000 * 10 ** 4000)|filesizeformat }}{% for i in range(99999) %}{{ (9**9999)|string|length }}{% endfor %}",
    "int_of_text": "{% for i in range(99999) %}{{ ('9' * 4299)|int * (('9' * 4299)|int) > i }}{% endfor %}",
    "int_base": "{% for i in range(99999) %}{{ ('z' * 99999)|int(base=32) > i }}{% endfor %}",
    "float_power": "{% for i in range(99999) %}{% for j in range(99999) %}{{ 2.0 ** 1000 }}{% endfor %}{% endfor %}",
    "round_digits": "{% for i in range(99999) %}{{ 1.1|round(300) }}{{ ('x' * 9999)|length }}{% set a = 'y' * 99999 %}{{ a }}{% endfor %}",
    "groupby_many": "{{ (range(99999)|map('string')|list * 99)|groupby('x')|length }}",
    "unique_many": "{{ (range(99999)|list * 999)|unique|list|length }}",
    "sort_text": "{{ ('x' * 262144)|sort|length }}",
    "sort_alike": "{% set s = 'x' * 25000 %}{% for i in range(99999) %}{{ [s ~ 1, s ~ 2, s ~ 3, s ~ 1, s ~ 2]|sort|length }}{% endfor %}",
    "sort_in_a_loop": "{% set l = range(9999)|list %}{% for i in range(9999) %}{{ l|sort(reverse=true)|length }}{% endfor %}",
    "dictsort_in_a_loop": "{% set d = {'b': 'x' * 99999, 'a': 1} %}{% for i in range(99999) %}{{ d|dictsort|length }}{% endfor %}",
    "dictsort": "{{ dict(((range(99999)|map('string')|list * 99)|batch(2)|list))|dictsort|length }}",
    "slice_copies": "{% set s = 'x' * 9999999 %}{% for i in range(99999) %}{% set t = s[i:] %}{% endfor %}",
    "slice_list_copies": "{% set s = range(99999)|list %}{% for i in range(99999) %}{% set t = s[i:] %}{% endfor %}",
    "slice_step": "{% set s = 'x' * 9999999 %}{% for i in range(99999) %}{% set t = s[::-1] %}{% endfor %}",
    "messages_times_messages": "{% for a in messages * 9999 %}{% for b in messages * 9999 %}{{ a.content }}{% endfor %}{% endfor %}",
    "macro_fibonacci": "{% macro f(n) %}{% if n < 2 %}1{% else %}{{ f(n - 1) }}{{ f(n - 2) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macro_ackermann": "{% macro a(m, n) %}{% if m == 0 %}{{ n + 1 }}{% elif n == 0 %}{{ a(m - 1, 1) }}{% else %}{{ a(m - 1, a(m, n - 1)|int) }}{% endif %}{% endmacro %}{{ a(4, 4) }}",
    "macro_mutual": "{% macro f(n) %}{{ g(n) }}{{ g(n) }}{% endmacro %}{% macro g(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "macro_default": "{% macro f(a='x' * 999999999) %}{{ a|length }}{% endmacro %}{{ f() }}",
    "call_block_tree": "{% macro m(n) %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call m(1) %}" * 30 + "x" + "{% endcall %}" * 30,
    "filter_block_tree": "{% filter center(9999999) %}" * 9 + "x" + "{% endfilter %}" * 9,
    "set_block_doubling": "".join(f"{{% set a{i} %}}{{{{ a{i - 1} }}}}{{{{ a{i - 1} }}}}{{% endset %}}" for i in range(1, 40)).replace("a0", "messages"),
    "straight_line_doubling": "{% set a = 'x' %}" + "{% set a = a ~ a %}" * 40 + "{{ a|length }}",
    "straight_line_doubling_plus": "{% set a = 'x' %}" + "{% set a = a + a %}" * 40 + "{{ a|length }}",
    "straight_line_lists": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 40 + "{{ a }}",
    "straight_line_sum": "{% set a = 'x' * 65536 %}{{ " + "+".join(["a"] * 30) + " }}" * 1 + ("{{ " + "+".join(["a"] * 30) + " }}") * 900,
    "wide_loop_body": "{% for i in range(99999) %}" + "{% set a = 'x' %}{% if i == 7 %}{{ a }}{% endif %}" * 900 + "{% endfor %}",
    "filtered_loop": "{% for i in range(99999) if [i] in [range(9999)|list] %}{% endfor %}",
    "loop_length": "{% for i in range(99999)|map('string') %}{{ loop.length }}{% for j in range(99999)|map('string') %}{{ loop.length }}{% endfor %}{% endfor %}",
    "loop_changed": "{% set l = range(99999)|list %}{% for i in range(99999) %}{{ loop.changed(l + [i]) }}{% endfor %}",
    "find_in_text": "{% set s = 'a' * 9999999 %}{% for i in range(99999) %}{{ s.find('ab') }}{{ 'b' in s }}{{ s.count('b') }}{% endfor %}",
    "strftime_loop": "{% for i in range(99999) %}{{ strftime_now('%c' * 100) }}{% endfor %}",
    "dict_keys": "{% set ns = namespace(d={}) %}{% for i in range(99999) %}{% set ns.d = dict(ns.d, **{i|string: ns.d}) %}{% endfor %}{{ ns.d }}",
    "case_mapping": "{{ ('ΐ' * 99999999)|upper|length }}",
    "many_filters_compile": "{{ 'x'" + "|upper" * 30000 + " }}",
    "many_statements": "{{ messages|length }}" * 12000 + "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "many_macros": "".join(f"{{% macro m{i}() %}}{{{{ m{i + 1}() }}}}{{{{ m{i + 1}() }}}}{{% endmacro %}}" for i in range(60)) + "{{ m0() }}",
    "nested_ifs": "{% if 1 %}" * 90 + "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}" + "{% endif %}" * 90,
    "long_compare": "{{ 1" + " < 2" * 30000 + " }}",
    "nested_lists_source": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "nested_dicts_source": "{{ " + "{'a':" * 3000 + "1" + "}" * 3000 + " }}",
    "nots": "{{ " + "not " * 30000 + "1 }}",
    "minuses": "{{ " + "-" * 30000 + "1 }}",
    "attributes": "{{ messages" + ".a" * 60000 + " }}",
}  # fmt: skip

_MESSAGES = [{"role": "user", "content": "hello"}, {"role": "user", "content": "999999999"}]


def outcome(source: str, pool: TemplatePool | None) -> dict[str, object]:
    """Render one bomb. Return the outcome and the least processor time: seconds, and units of `reference_s` now unless
    it is next to nothing."""
    render_cpu_s = 0.0
    try:
        template = ChatTemplate(source, special_tokens={}, pool=pool)
        # too large to be rendered inline, where there is a pool
        padding = {} if pool is None else {"padding": "x" * MAX_INPUT_CHARS}
        tries = 3 if pool is None else 1
        result, render_cpu_s = least_seconds(template, _MESSAGES, padding, tries=tries)
    except TemplateError:
        result = "does not compile"
    references = render_cpu_s / reference_s() if render_cpu_s >= HELD_S else 0.0
    return {"result": result, "render_cpu_s": render_cpu_s, "references": references}


def thread_seconds(
    template: ChatTemplate, messages: list[dict[str, Any]], arguments: dict[str, Any] | None = None
) -> tuple[str, float]:
    """Render once. Return the outcome, and the processor seconds that this thread spent on it. Other processes raise
    them, too (by cold caches): a test with a bound takes the least of a few.

    What else runs on the machine makes these more, too (by cold caches): whoever sets a bound takes the least of a few.
    """
    worked = time.thread_time()
    try:
        result = f"rendered {len(template.render(messages, template_kwargs=arguments))}"
    except NeedsWorkerError:
        result = "stopped"
    except TemplateError as error:
        result = f"refused: {error}"
    return result, time.thread_time() - worked


def least_seconds(
    template: ChatTemplate, messages: list[dict[str, Any]], arguments: dict[str, Any] | None = None, *, tries: int = 3
) -> tuple[str, float]:
    """Return `thread_seconds` of the fastest rendering; one that holds no loop is not repeated."""
    result, least_s = thread_seconds(template, messages, arguments)
    for _ in range(tries - 1):
        if least_s < HELD_S:
            break
        result, seconds = thread_seconds(template, messages, arguments)
        least_s = min(least_s, seconds)
    return result, least_s


class _Peak:
    """The largest resident set of a pool's workers, in bytes, seen every few milliseconds."""

    def __init__(self, pool: TemplatePool) -> None:
        self.bytes = 0
        self._pool = pool
        self._stop = threading.Event()

    def _watch(self) -> None:
        while not self._stop.wait(0.003):
            for pid in self._pool.pids():
                with contextlib.suppress(OSError):
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                    self.bytes = max(self.bytes, pages * resource.getpagesize())

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


def main() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, source in BOMBS.items():
        sys.stdout.write(json.dumps({"name": name, "where": "inline", **outcome(source, None)}) + "\n")
    inline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.closing(TemplatePool(LIMITS)) as pool:
        peak = _Peak(pool)
        with peak.watching():
            for name, source in BOMBS.items():
                sys.stdout.write(json.dumps({"name": name, "where": "worker", **outcome(source, pool)}) + "\n")
    memory = {"inline_growth_bytes": (inline - before) << 10, "worker_peak_bytes": peak.bytes}
    sys.stdout.write(json.dumps({"name": "memory", **memory}) + "\n")


if __name__ == "__main__":
    main()
