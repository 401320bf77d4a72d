//! Chat templates: the text that transformers renders, separate errors, bounded work.

use std::fs;
use std::time::{Duration, Instant, UNIX_EPOCH};

use container::{ChatInput, ChatTemplate, ContainerError};
use serde_json::json;

fn render(template: &str, messages: serde_json::Value) -> Result<String, ContainerError> {
    ChatTemplate::from_text(template)?.render(messages.as_array().unwrap(), false, None)
}

/// `tools.txt` is what transformers 5.24 renders from `tools.jinja` with these messages.
#[test]
fn equals_transformers() {
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <b> & \"you\" é\n"},
        {"role": "assistant", "content": "x</think> y ", "tool_calls": [{"function": {"name": "f",
            "arguments": {"a": 1.0, "b": [true, null, 1e-7], "c": {"k": "v\u{2028}"}}}}]},
        {"role": "user", "content": [{"type": "text", "text": "part"}]}
    ]);
    let variables = json!({"enable_thinking": false, "n": null, "flag": true, "num": 2.0,
        "lst": [1, "a", null, 2.5], "d": {"a": 1}});
    let template = ChatTemplate::from_text(include_str!("../data/tools.jinja")).unwrap();
    let text = template.render(messages.as_array().unwrap(), true, variables.as_object()).unwrap();
    assert_eq!(text, include_str!("../data/tools.txt"));
}

#[test]
fn three_kinds_of_failure_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let error = ChatTemplate::load_required(dir.path()).unwrap_err();
    assert!(matches!(error, ContainerError::NoChatTemplate { .. }), "{error}");

    let error = render("{% if %}", json!([])).unwrap_err();
    assert!(matches!(error, ContainerError::TemplateSyntax { .. }), "{error}");

    let error = render(
        "{% if messages[0].role != 'user' %}\n{{ raise_exception('start with the user') }}{% endif %}",
        json!([{"role": "system", "content": ""}]),
    )
    .unwrap_err();
    assert!(matches!(error, ContainerError::TemplateRender { .. }), "{error}");
    assert!(error.to_string().contains("start with the user"), "{error}");
    assert!(error.to_string().contains("line 2"), "{error}");
}

#[test]
fn sources_in_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let text = |path: &std::path::Path| {
        let template = ChatTemplate::load_required(path).unwrap();
        let messages = [json!({"role": "user", "content": "x"})];
        let tool = [json!({"type": "function"})];
        let with_tools = ChatInput {
            messages: &messages,
            tools: Some(&tool),
            add_generation_prompt: false,
            variables: None,
            now: UNIX_EPOCH,
        };
        (
            template.render(&messages, false, None).unwrap(),
            template.render_input(&with_tools).unwrap(),
        )
    };
    let config = json!({"bos_token": {"content": "<s>"}, "chat_template": [
        {"name": "default", "template": "{{ bos_token }}default"},
        {"name": "tool_use", "template": "tools {{ tools | length }} {{ strftime_now('%d %b %Y') }}"},
        {"name": "rag", "template": "{% broken"}]});
    fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    assert_eq!(text(dir.path()), ("<s>default".into(), "tools 1 01 Jan 1970".into()));
    fs::write(dir.path().join("chat_template.json"), r#"{"chat_template": "json"}"#).unwrap();
    assert_eq!(text(dir.path()).0, "json");
    fs::write(dir.path().join("chat_template.jinja"), "{{ messages[0].content }} jinja").unwrap();
    assert_eq!(text(dir.path()).0, "x jinja");
}

#[test]
fn null_keys_and_reasoning_names() {
    let template = "{% for m in messages %}{{ m.content is defined }} {{ m.reasoning_content }} {{ m.thinking }};{% endfor %}";
    let messages =
        json!([{"role": "a", "content": null, "reasoning": "r"}, {"role": "b", "content": ""}]);
    assert_eq!(render(template, messages).unwrap(), "False r r;True  ;");
}

#[test]
fn generation_blocks_keep_their_whitespace_rules() {
    let template = "a\n{%- generation -%}\n b{% endgeneration %}{{ '%}' }}{% generation %}c{%- endgeneration %}";
    assert_eq!(render(template, json!([])).unwrap(), "ab%}c");
}

#[test]
fn odd_tags() {
    for text in [
        "{%}",
        "{%",
        "{%%}",
        "{%-%}",
        "{%+%}",
        "%}{%",
        "{%{%}%}",
        "{% generation",
        "{%generation%}",
    ] {
        assert!(
            matches!(ChatTemplate::from_text(text), Err(ContainerError::TemplateSyntax { .. })),
            "{text}"
        );
    }
    assert_eq!(render("{%generation%}x{%-endgeneration%}", json!([])).unwrap(), "x");
}

/// Templates come with downloaded models: none may take unbounded time or memory.
#[test]
fn hostile_templates_stop() {
    let doubling = "{% set ns = namespace(s='x' * 1000) %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
    let endless =
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}";
    let recursion = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
    let repeat = "{{ ('x' * 90000000) * 1 }}{{ 'y' * 90000000 }}";
    let indent = "{{ [[1]] | tojson(indent=1000000000) }}";
    let filter = "{% set x = 'ab' * 100000 %}{% for i in range(99999) %}{% set y = x | upper | reverse %}{% endfor %}";
    let deep = format!("{}{}", "{% if x %}".repeat(5000), "{% endif %}".repeat(5000));
    let brackets = format!("{{{{ {} }}}}", "[".repeat(100_000));
    for template in [doubling, endless, recursion, repeat, indent, filter, &deep, &brackets] {
        let start = Instant::now();
        let error = render(template, json!([])).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(20), "{error}");
    }
    // And a long conversation still fits the budget.
    let long = "word ".repeat(400_000);
    let messages = json!([{"role": "user", "content": long}]);
    let text = render(
        "{% for m in messages %}{{ m.content | trim }}{{ m.content.strip() }}{{ m | tojson }}{% endfor %}",
        messages,
    )
    .unwrap();
    assert!(text.len() > 6_000_000);
}
