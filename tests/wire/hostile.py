# ruff: noqa: E501
"""Renders hostile templates under a memory limit and prints one JSON line about each: run as a script."""

import json
import resource
import sys
import time

from treeline_wire.budget import Limits
from treeline_wire.chat import ChatTemplate, TemplateError

#: Address space of the process beyond what it has when it starts to render, in bytes.
MEMORY_LIMIT = 1 << 30
SECONDS = 0.5

#: Must be refused, by name.
REFUSED: dict[str, str] = {
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
    # reach
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "attr_filter": "{{ (''|attr('__class__')).__mro__ }}",
    "getitem": "{{ ''['__class__']['__mro__'] }}",
    "map_attribute": "{{ ['']|map(attribute='__class__')|map(attribute='__mro__')|list|first|list }}",
    "format_attribute": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format_map_attribute": "{{ '{a.__class__.__mro__}'.format_map({'a': ''}) }}",
    "init_globals": "{{ cycler.__init__.__globals__ }}",
    "self_class": "{{ self.__class__.__mro__ }}",
    "macro_code": "{% macro m() %}{% endmacro %}{{ m._func.__code__ }}",
    "mutate_append": "{{ messages.append(1) }}",
    "mutate_update": "{{ messages[0].update({'a': 1}) }}",
    "mutate_clear": "{{ messages.clear() }}",
    "mutate_pop": "{{ messages[0].pop('role') }}",
    "namespace_dunder": "{% set ns = namespace(__class__=1) %}",
    "namespace_private": "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "include": "{% include 'other' %}",
    "import": "{% import 'other' as o %}",
    "extends": "{% extends 'other' %}",
    "lipsum": "{{ lipsum(9999999) }}",
    "encode": "{{ 'x'.encode('utf-8') }}",
    "translate": "{{ ('x' * 99999).translate({120: 'y' * 99999}) }}",
    "print_namespace": "{{ namespace(a=1) }}",
    "print_function": "{{ raise_exception }}",
    "memory_of_characters": "{{ (('xy' * 999999)|list)|length }}",
    "memory_of_pieces": "{{ (('x ' * 999999).split())|length }}",
    "memory_of_lines": "{{ (('\\n' * 1999999).splitlines())|length }}",
    "memory_of_batches": "{{ (('xy' * 999999)|batch(1)|list)|length }}",
    "internal_filter": "{{ 1|charge! }}",
    "pprint": "{{ messages|pprint }}",
}  # fmt: skip


def main() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_LIMIT, size + MEMORY_LIMIT))
    for name, source in REFUSED.items():
        outcome = {"name": name, "error": None, "rendered": 0, "render_s": 0.0}
        begin = time.perf_counter()
        try:
            template = ChatTemplate(source, special_tokens={}, limits=Limits(seconds=SECONDS))
            outcome["compile_s"] = time.perf_counter() - begin
            begin = time.perf_counter()
            outcome["rendered"] = len(template.render([{"role": "user", "content": "hello"}]))
        except TemplateError as error:
            outcome["error"] = str(error)
        outcome["render_s" if "compile_s" in outcome else "compile_s"] = time.perf_counter() - begin
        sys.stdout.write(json.dumps(outcome) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
