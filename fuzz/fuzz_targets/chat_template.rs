//! Chat templates: any text must compile or fail, and render within its budget.

#![no_main]

use container::ChatTemplate;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(template) = ChatTemplate::from_text(text) else { return };
    let messages = messages();
    let _ = template.render(&messages, true, None);
});

fn messages() -> Vec<serde_json::Value> {
    let text = r#"[{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text",
        "text": "é"}]}, {"role": "assistant", "content": null, "tool_calls": [{"function": {"name":
        "f", "arguments": {"a": [1, 2.5, null, true, {"b": "\n"}]}}}]}]"#;
    serde_json::from_str(text).unwrap()
}
