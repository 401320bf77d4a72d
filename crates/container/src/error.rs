//! The errors of this crate.
//!
//! Every variant means that what the user gave cannot be used (exit code 2): the text names the
//! file, the tensor or field, what was expected, what was found and what to do. Nothing here
//! decides how an error is printed.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::header::HeaderError;
use crate::report::MissingTensors;

/// Everything that can be wrong with a model directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContainerError {
    /// The operating system refused; `action` says what was tried and where in the file.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What was tried, with offset and length where there is one.
        action: String,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The name exists but is a directory, pipe or device.
    #[error("{}: not a regular file; put the file itself there", path.display())]
    NotAFile {
        /// What was found.
        path: PathBuf,
    },
    /// The model directory is not a directory.
    #[error("{}: not a directory; a model is a directory with config.json and *.safetensors", path.display())]
    NotADirectory {
        /// What was found.
        path: PathBuf,
    },
    /// A small file (JSON, tokenizer, template) is larger than any real one.
    #[error("{}: {found_bytes} bytes, at most {limit_bytes} are read; is this the right file?", path.display())]
    FileTooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        found_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// A file that must exist does not.
    #[error("{}: missing {file}; {remedy}", dir.display())]
    MissingFile {
        /// Directory searched.
        dir: PathBuf,
        /// Name of the file.
        file: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// No directory holds a `*.safetensors` file.
    #[error(
        "{dirs}: no *.safetensors file; download the weights or point --model at the directory that holds them"
    )]
    NoTensorFiles {
        /// The directories, joined.
        dirs: String,
    },
    /// More files or tensors than any real model has.
    #[error("{}: {found} {what}, at most {limit} are accepted", path.display())]
    TooMany {
        /// Directory or file that goes over the limit.
        path: PathBuf,
        /// What is counted.
        what: &'static str,
        /// Number found.
        found: usize,
        /// The limit.
        limit: usize,
    },
    /// A safetensors header is broken, or the file is shorter or longer than it says.
    #[error("{}: {source}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: HeaderError,
    },
    /// A JSON file or JSON text inside a header does not parse.
    #[error("{}: {what} is not valid: {message}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Which JSON.
        what: &'static str,
        /// The parser's message, with line and column.
        message: String,
    },
    /// One tensor name in two files.
    #[error("tensor {name} is stored twice: in {} and in {}; remove one of the files", first.display(), second.display())]
    DuplicateTensor {
        /// The tensor.
        name: String,
        /// First file.
        first: PathBuf,
        /// Second file.
        second: PathBuf,
    },
    /// Two files state different formats for one tensor.
    #[error("tensor {name}: {} states format {first_format}, {} states {second_format}; the files do not belong together", first.display(), second.display())]
    ConflictingStamps {
        /// The tensor.
        name: String,
        /// First file.
        first: PathBuf,
        /// Its format name.
        first_format: String,
        /// Second file.
        second: PathBuf,
        /// Its format name.
        second_format: String,
    },
    /// A configuration value that is missing, impossible, or not implemented.
    #[error("{source_name}: {field}: {problem}")]
    Config {
        /// Path of the file, or its name when read from memory.
        source_name: String,
        /// Field, as spelled in the file.
        field: String,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// A stored tensor does not fit what the configuration says, or its format is not clear.
    #[error(transparent)]
    Tensor(Box<TensorError>),
    /// Tensors the model needs are in no file.
    #[error(transparent)]
    MissingTensors(Box<MissingTensors>),
    /// There are no tokenizer files at all.
    #[error("{}: no tokenizer file (looked for tokenizer.json, *.tiktoken and *.model); fetch it from the model's repository, token ids still work without it", dir.display())]
    NoTokenizer {
        /// Directory searched.
        dir: PathBuf,
    },
    /// The tokenizer file cannot be used.
    #[error("{}: unusable tokenizer: {message}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// A rank file without the list of special tokens that belongs to it.
    #[error("{}: {message}; fetch tokenizer_config.json of the same model", path.display())]
    MissingSpecialTokens {
        /// The file that should name them.
        path: PathBuf,
        /// What is missing.
        message: String,
    },
    /// Text could not be encoded or ids could not be decoded.
    #[error("tokenizer failed on this text: {message}")]
    Tokenize {
        /// The tokenizer's message.
        message: String,
    },
    /// The model has no chat template.
    #[error("{}: no chat template (looked for chat_template.jinja, chat_template.json and chat_template in tokenizer_config.json); use plain completion, or add the template of the model's repository", dir.display())]
    NoChatTemplate {
        /// Directory searched.
        dir: PathBuf,
    },
    /// The chat template does not compile.
    #[error("{}: chat template does not compile: {message}", path.display())]
    TemplateSyntax {
        /// The file.
        path: PathBuf,
        /// The template engine's message, with the line.
        message: String,
    },
    /// The chat template refused or failed on these messages.
    #[error("the chat template failed on these messages: {message}")]
    TemplateRender {
        /// The template's own message (`raise_exception`) or the engine's, with the line.
        message: String,
    },
}

/// One stored tensor that cannot be used, with both facts.
#[derive(Debug)]
pub struct TensorError {
    /// The tensor.
    pub name: String,
    /// The file that holds it.
    pub path: PathBuf,
    /// Offset of its bytes in that file.
    pub offset: u64,
    /// What the configuration or the stamp asks for.
    pub expected: String,
    /// What the file has.
    pub found: String,
    /// What to do.
    pub remedy: &'static str,
}

impl fmt::Display for TensorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: tensor {} (at byte {}): expected {}, found {}; {}",
            self.path.display(),
            self.name,
            self.offset,
            self.expected,
            self.found,
            self.remedy
        )
    }
}

impl std::error::Error for TensorError {}

impl ContainerError {
    pub(crate) fn io(path: &Path, action: impl Into<String>, source: std::io::Error) -> Self {
        ContainerError::Io { path: path.to_owned(), action: action.into(), source }
    }
}
