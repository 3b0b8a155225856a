//! The system prompt: inline in the spec, or a mounted file that people edit while the loop runs.

use std::path::PathBuf;

/// Longest instructions, in bytes, wherever they are kept.
pub const MAX_BYTES: usize = 32 * 1024;

/// Where the instructions come from, and the last ones that could be used.
pub struct Instructions {
    file: Option<PathBuf>,
    last: String,
    /// Why the file could not be used the last time, so that each reason is logged once.
    complaint: Option<String>,
}

impl Instructions {
    /// Takes the inline text, or reads the file for the first time.
    pub fn load(inline: Option<String>, file: PathBuf) -> Result<Self, String> {
        let (file, last) = if let Some(text) = inline {
            (None, text)
        } else {
            let text = read(&file)?;
            (Some(file), text)
        };
        Ok(Self {
            file,
            last,
            complaint: None,
        })
    }

    /// The newest text. A file that cannot be used is logged once, and the text before it stays.
    pub fn newest(&mut self) -> &str {
        match self.file.as_ref().map(read).transpose() {
            Ok(text) => {
                self.last = text.unwrap_or_else(|| std::mem::take(&mut self.last));
                self.complaint = None;
            }
            Err(complaint) if self.complaint.as_ref() == Some(&complaint) => {}
            Err(complaint) => {
                tracing::warn!("{complaint}; the loop goes on with the instructions it has");
                self.complaint = Some(complaint);
            }
        }
        &self.last
    }
}

fn read(file: &PathBuf) -> Result<String, String> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        format!(
            "the instructions in {} cannot be read ({error}): check spec.instructionsFrom",
            file.display()
        )
    })?;
    if text.len() > MAX_BYTES {
        return Err(format!(
            "the instructions in {} have {} bytes and may have {MAX_BYTES}: shorten what spec.instructionsFrom names",
            file.display(),
            text.len()
        ));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inline_text_never_looks_at_the_file() {
        let mut instructions = Instructions::load(Some("be".into()), "/nowhere".into()).unwrap();
        assert_eq!(instructions.newest(), "be");
    }

    #[test]
    fn an_edit_is_seen_and_a_file_that_cannot_be_read_leaves_the_last_text() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("text");
        std::fs::write(&file, "one").unwrap();
        let mut instructions = Instructions::load(None, file.clone()).unwrap();
        std::fs::write(&file, "two").unwrap();
        assert_eq!(instructions.newest(), "two");
        std::fs::write(&file, [0xff]).unwrap();
        assert_eq!(instructions.newest(), "two");
        std::fs::remove_file(&file).unwrap();
        assert_eq!(instructions.newest(), "two");
        std::fs::write(&file, "three").unwrap();
        assert_eq!(instructions.newest(), "three");
    }

    #[test]
    fn the_first_text_must_be_there_and_says_what_to_check() {
        let complaint = Instructions::load(None, "/nowhere".into()).err().unwrap();
        assert!(complaint.contains("/nowhere") && complaint.contains("spec.instructionsFrom"));
    }

    #[test]
    fn text_of_32_kib_is_taken_and_one_byte_more_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("text");
        std::fs::write(&file, "x".repeat(MAX_BYTES)).unwrap();
        let mut instructions = Instructions::load(None, file.clone()).unwrap();
        std::fs::write(&file, "x".repeat(MAX_BYTES + 1)).unwrap();
        assert_eq!(instructions.newest().len(), MAX_BYTES);
    }
}
