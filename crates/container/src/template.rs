//! Chat templates: from messages to the text that the tokenizer reads.
//!
//! The template language and its helpers behave as in `transformers`: blocks trimmed, Python
//! methods on values, `raise_exception`, `strftime_now`, `tojson` in Python's form, `generation`
//! blocks accepted and ignored. A render has a budget of work and memory, so no template of a
//! downloaded model can hang the program.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use serde_json::Value as Json;

use crate::error::ContainerError;
use crate::json::read_optional_text;
use crate::python::{self, JsonStyle};
use crate::tokenizer_config::TokenizerConfig;

/// Largest template file read; the longest known has about 30 kB.
pub const MAX_TEMPLATE_BYTES: u64 = 4 << 20;
/// Fuel of one render: about a million template steps or 64 MB of text.
pub const BASE_FUEL: u64 = 1_000_000;
/// Further fuel per byte of messages; a byte costs 1/64 each time it is copied.
const FUEL_PER_INPUT_BYTE: u64 = 1;
/// Widest indentation that `tojson` accepts.
const MAX_INDENT: usize = 64;
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// A compiled chat template. It may be shared between threads.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    environment: Environment<'static>,
    has_tool_use: bool,
    /// Texts of `bos_token` and the other named tokens.
    named: Vec<(&'static str, String)>,
}

/// What a template is rendered from.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// The messages, each an object with `role` and usually `content`.
    pub messages: &'a [Json],
    /// Tools in the form of the OpenAI API.
    pub tools: Option<&'a [Json]>,
    /// Whether the text ends with the opening of an assistant turn.
    pub add_generation_prompt: bool,
    /// Further variables, `enable_thinking` for one.
    pub variables: Option<&'a serde_json::Map<String, Json>>,
    /// The time that `strftime_now` shows, in UTC.
    pub now: SystemTime,
}

impl ChatTemplate {
    /// Loads the template of a model directory; `None` when it has none.
    ///
    /// `chat_template.jinja` comes first, then `chat_template.json`, then `chat_template` in
    /// `tokenizer_config.json`: a text, or a list of named texts of which `default` and, when
    /// tools are given, `tool_use` are used.
    pub fn load(dir: &Path) -> Result<Option<ChatTemplate>, ContainerError> {
        let config = TokenizerConfig::load(dir)?.unwrap_or_default();
        let path = dir.join("chat_template.jinja");
        if let Some(text) = read_optional_text(&path, MAX_TEMPLATE_BYTES, "chat template")? {
            return ChatTemplate::build(path, &Json::String(text), config.named).map(Some);
        }
        let path = dir.join("chat_template.json");
        if let Some(text) = read_optional_text(&path, MAX_TEMPLATE_BYTES, "chat template")? {
            let json: Json = serde_json::from_str(&text).map_err(|e| ContainerError::Json {
                path: path.clone(),
                what: "chat template",
                message: e.to_string(),
            })?;
            let template = json.get("chat_template").cloned().unwrap_or_default();
            return ChatTemplate::build(path, &template, config.named).map(Some);
        }
        match &config.chat_template {
            Some(template) => {
                ChatTemplate::build(config.path.clone(), template, config.named).map(Some)
            }
            None => Ok(None),
        }
    }

    /// As [`ChatTemplate::load`]; having none is an error of its own.
    pub fn load_required(dir: &Path) -> Result<ChatTemplate, ContainerError> {
        ChatTemplate::load(dir)?
            .ok_or_else(|| ContainerError::NoChatTemplate { dir: dir.to_owned() })
    }

    /// Compiles a template given as text, without named tokens.
    pub fn from_text(text: &str) -> Result<ChatTemplate, ContainerError> {
        let path = PathBuf::from("chat_template.jinja");
        ChatTemplate::build(path, &Json::String(text.to_owned()), Vec::new())
    }

    fn build(
        path: PathBuf,
        template: &Json,
        named: Vec<(&'static str, String)>,
    ) -> Result<ChatTemplate, ContainerError> {
        let bad = |message: String| ContainerError::TemplateSyntax { path: path.clone(), message };
        let mut texts: Vec<(&'static str, &str)> = Vec::new();
        match template {
            Json::String(text) => texts.push((DEFAULT, text)),
            Json::Array(items) => {
                for item in items {
                    let name = item.get("name").and_then(Json::as_str);
                    let text = item.get("template").and_then(Json::as_str);
                    let (Some(name), Some(text)) = (name, text) else {
                        return Err(bad("a named template without name or text".to_owned()));
                    };
                    for known in [DEFAULT, TOOL_USE] {
                        if name == known {
                            texts.push((known, text));
                        }
                    }
                }
            }
            _ => return Err(bad("neither a text nor a list of named texts".to_owned())),
        }
        if !texts.iter().any(|(name, _)| *name == DEFAULT) {
            return Err(bad("no template is named \"default\"".to_owned()));
        }
        let mut environment = environment().map_err(|e| bad(e.to_string()))?;
        for (name, text) in &texts {
            environment
                .add_template_owned(*name, without_generation_blocks(text))
                .map_err(|e| bad(describe(&e)))?;
        }
        let has_tool_use = texts.iter().any(|(name, _)| *name == TOOL_USE);
        Ok(ChatTemplate { path, environment, has_tool_use, named })
    }

    /// The file it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renders messages with variables, at the present time.
    pub fn render(
        &self,
        messages: &[Json],
        add_generation_prompt: bool,
        variables: Option<&serde_json::Map<String, Json>>,
    ) -> Result<String, ContainerError> {
        let now = SystemTime::now();
        self.render_input(&ChatInput {
            messages,
            tools: None,
            add_generation_prompt,
            variables,
            now,
        })
    }

    /// Renders; a template that refuses the messages gives its own words in the error.
    pub fn render_input(&self, input: &ChatInput<'_>) -> Result<String, ContainerError> {
        let failed = |e: Error| ContainerError::TemplateRender { message: describe(&e) };
        let mut input_bytes = 0;
        let mut value = |json: &Json| to_value(json, &mut input_bytes);
        let messages: Vec<Value> = input.messages.iter().map(|m| value(&normalized(m))).collect();
        let tools = input.tools.map(|tools| tools.iter().map(&mut value).collect::<Vec<_>>());
        let mut context: Vec<(String, Value)> = vec![
            ("tools".to_owned(), tools.map_or_else(|| Value::from(()), Value::from)),
            ("documents".to_owned(), Value::from(())),
        ];
        for (name, text) in &self.named {
            context.push(((*name).to_owned(), Value::from(text.as_str())));
        }
        for (name, json) in input.variables.into_iter().flatten() {
            context.push((name.clone(), value(json)));
        }
        context.push(("messages".to_owned(), Value::from(messages)));
        context
            .push(("add_generation_prompt".to_owned(), Value::from(input.add_generation_prompt)));
        let seconds = seconds_since_epoch(input.now);
        let show_now = move |format: String| python::strftime(&format, seconds);
        context.push(("strftime_now".to_owned(), Value::from_function(show_now)));
        let name = if self.has_tool_use && input.tools.is_some() { TOOL_USE } else { DEFAULT };
        let mut environment = self.environment.clone();
        let extra = FUEL_PER_INPUT_BYTE.saturating_mul(input_bytes);
        environment.set_fuel(Some(BASE_FUEL.saturating_add(extra)));
        let template = environment.get_template(name).map_err(failed)?;
        template.render(Value::from_pairs(context)).map_err(failed)
    }
}

fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_fuel(Some(BASE_FUEL));
    environment.set_formatter(|out, state, value| match value.kind() {
        // Python's spelling of its constants.
        ValueKind::None => out.write_str("None").map_err(Error::from),
        ValueKind::Bool => {
            let text = if value.is_true() { "True" } else { "False" };
            out.write_str(text).map_err(Error::from)
        }
        _ => minijinja::escape_formatter(out, state, value),
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_filter("tojson", to_json);
    Ok(environment)
}

/// The `tojson` of `transformers`: `json.dumps` with `ensure_ascii` off unless asked for.
fn to_json(state: &State, value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let mut style = JsonStyle {
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ..JsonStyle::default()
    };
    style.indent = kwargs.get::<Option<usize>>("indent")?;
    if style.indent.is_some_and(|indent| indent > MAX_INDENT) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: the indentation is too wide"));
    }
    if style.indent.is_some() {
        style.item_separator = ",".to_owned();
    }
    if let Some(separators) = kwargs.get::<Option<Value>>("separators")? {
        let item = separators.get_item_by_index(0)?;
        let key = separators.get_item_by_index(1)?;
        if let (Some(item), Some(key)) = (item.as_str(), key.as_str()) {
            style.item_separator = item.to_owned();
            style.key_separator = key.to_owned();
        }
    }
    kwargs.assert_all_used()?;
    python::json(value, &style, |bytes| state.consume_fuel(bytes as u64 / 64))
}

fn describe(error: &Error) -> String {
    let text = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{text} (line {line} of the template)"),
        None => text,
    }
}

fn seconds_since_epoch(time: SystemTime) -> i64 {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_secs()).map_or(i64::MIN, |s| -s),
    }
}

/// As `transformers` prepares a message: keys whose value is null are left out, and reasoning is
/// available as `reasoning_content` and `thinking` under whichever of its names it came.
fn normalized(message: &Json) -> Json {
    let Json::Object(map) = message else { return message.clone() };
    let mut kept: serde_json::Map<String, Json> =
        map.iter().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k.clone(), v.clone())).collect();
    let names = ["reasoning_content", "thinking", "reasoning"];
    if let Some(reasoning) = names.into_iter().find_map(|name| kept.get(name)).cloned() {
        kept.entry("thinking").or_insert_with(|| reasoning.clone());
        kept.insert("reasoning_content".to_owned(), reasoning);
    }
    Json::Object(kept)
}

/// JSON as a template value; counts the bytes of its texts.
fn to_value(json: &Json, bytes: &mut u64) -> Value {
    *bytes += 16;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(value), _, _) => Value::from(value),
            (_, Some(value), _) => Value::from(value),
            (_, _, value) => Value::from(value.unwrap_or(f64::NAN)),
        },
        Json::String(text) => {
            *bytes += text.len() as u64;
            Value::from(text.as_str())
        }
        Json::Array(items) => {
            Value::from(items.iter().map(|item| to_value(item, bytes)).collect::<Vec<_>>())
        }
        Json::Object(map) => Value::from_pairs(map.iter().map(|(key, item)| {
            *bytes += key.len() as u64;
            (Value::from(key.as_str()), to_value(item, bytes))
        })),
    }
}

/// Turns `{% generation %}` blocks, which only mark text for training, into plain blocks.
fn without_generation_blocks(template: &str) -> String {
    let mut text = String::with_capacity(template.len());
    let mut rest = template;
    while let Some((before, tag)) = rest.split_once("{%") {
        text.push_str(before);
        text.push_str("{%");
        rest = tag;
        // Other tags are not passed over as a whole: they may contain "%}" in a string.
        let Some((inner, after)) = tag.split_once("%}") else { continue };
        let word = inner.trim_matches(|c: char| matches!(c, '-' | '+') || c.is_whitespace());
        let plain = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        text.push_str(&inner.replacen(word, plain, 1));
        text.push_str("%}");
        rest = after;
    }
    text.push_str(rest);
    text
}
