//! Splits the commands of a code block as a shell does.

/// The simple commands of a block, each as its words. Comments, redirections and `VAR=value` before a command are
/// removed; commands in `$(…)` are their own commands too.
pub(super) fn commands(block: &str) -> Vec<Vec<String>> {
    let mut splitter = Splitter::default();
    let mut letters = block.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => match letters.next() {
                Some('\n') | None => {}
                Some(letter) => splitter.push(letter),
            },
            '\'' => {
                splitter.started = true;
                while let Some(letter) = letters.next().filter(|letter| *letter != '\'') {
                    splitter.push(letter);
                }
            }
            '"' => {
                splitter.started = true;
                splitter.quoted(&mut letters);
            }
            '$' if letters.peek() == Some(&'(') => {
                letters.next();
                splitter.substituted(&mut letters);
            }
            '#' if !splitter.started => while letters.next_if(|letter| *letter != '\n').is_some() {},
            '\n' | ';' | '|' | '&' | '(' | ')' => splitter.end_command(),
            '<' | '>' => splitter.redirect(),
            letter if letter.is_whitespace() => splitter.end_word(),
            letter => splitter.push(letter),
        }
    }
    splitter.end_command();
    splitter.commands
}

/// The lines of a block, each with all that it continues on: a backslash or a quote that is open at its end.
pub(super) fn lines(block: &str) -> Vec<String> {
    let (mut lines, mut line) = (Vec::new(), String::new());
    let mut quote = None;
    let mut letters = block.chars().peekable();
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (None, '#') if line.is_empty() || line.ends_with(char::is_whitespace) => {
                while letters.next_if(|letter| *letter != '\n').is_some() {}
                continue;
            }
            (None, '\n') => {
                lines.push(std::mem::take(&mut line));
                continue;
            }
            (None, '\'' | '"') => quote = Some(letter),
            (Some(open), _) if letter == open => quote = None,
            (None | Some('"'), '\\') => {
                line.push(letter);
                line.extend(letters.next());
                continue;
            }
            _ => {}
        }
        line.push(letter);
    }
    lines.push(line);
    lines.retain(|line| !line.trim().is_empty());
    lines
}

#[derive(Default)]
struct Splitter {
    commands: Vec<Vec<String>>,
    words: Vec<String>,
    word: String,
    started: bool,
    /// The next word is the file of a redirection.
    redirects: bool,
}

impl Splitter {
    fn push(&mut self, letter: char) {
        self.started = true;
        self.word.push(letter);
    }

    /// Up to the closing quote.
    fn quoted(&mut self, letters: &mut std::iter::Peekable<std::str::Chars<'_>>) {
        while let Some(letter) = letters.next() {
            match letter {
                '"' => return,
                '\\' => self.word.extend(letters.next().filter(|letter| *letter != '\n')),
                '$' if letters.peek() == Some(&'(') => {
                    letters.next();
                    self.substituted(letters);
                }
                letter => self.word.push(letter),
            }
        }
    }

    /// Up to the closing parenthesis: the commands inside, and a word in their place.
    fn substituted(&mut self, letters: &mut std::iter::Peekable<std::str::Chars<'_>>) {
        let (mut depth, mut inside) = (1, String::new());
        for letter in letters.by_ref() {
            depth += match letter {
                '(' => 1,
                ')' => -1,
                _ => 0,
            };
            if depth == 0 {
                break;
            }
            inside.push(letter);
        }
        self.commands.extend(commands(&inside));
        self.started = true;
        self.word.push_str("substituted");
    }

    fn redirect(&mut self) {
        // `2>` names a stream.
        if self.word.bytes().all(|byte| byte.is_ascii_digit()) {
            self.word.clear();
            self.started = false;
        }
        self.end_word();
        self.redirects = true;
    }

    fn end_word(&mut self) {
        if !self.started {
            return;
        }
        self.started = false;
        let word = std::mem::take(&mut self.word);
        if std::mem::take(&mut self.redirects) {
            return;
        }
        let is_assignment = word.split_once('=').is_some_and(|(name, _)| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        });
        if !(self.words.is_empty() && is_assignment) {
            self.words.push(word);
        }
    }

    fn end_command(&mut self) {
        self.end_word();
        self.redirects = false;
        if !self.words.is_empty() {
            self.commands.push(std::mem::take(&mut self.words));
        }
    }
}

#[test]
fn commands_are_split_as_a_shell_splits_them() {
    let block =
        "A=1 make x  # why\nkubectl patch \\\n  -p '{\"a\": 1}' | jq . 2>/dev/null > \"f g\"; echo \"$(date +%s) b\"\n";
    let words = commands(block);
    let expected = [
        vec!["make", "x"],
        vec!["kubectl", "patch", "-p", "{\"a\": 1}"],
        vec!["jq", "."],
        vec!["date", "+%s"],
        vec!["echo", "substituted b"],
    ];
    assert_eq!(words, expected);
}

#[test]
fn a_line_ends_outside_of_quotes() {
    let block = "a \\\n  b  # isn't\n\nc 'd\n# e' | f \"\\\"\n\" #\ng";
    assert_eq!(lines(block), ["a \\\n  b  ", "c 'd\n# e' | f \"\\\"\n\" ", "g"]);
}
