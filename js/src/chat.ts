// Chat messages as the prompt that a model was trained on, by the package's own Jinja template.
import { Template } from "@huggingface/jinja";
import { ArgumentError, shown } from "./errors.js";
import { hasFile, type PackageFiles, readText } from "./files.js";

/** A message, as in OpenAI's API. `content`: a text, or parts of type text. */
export interface Message {
  role: string;
  content?: string | readonly { type: "text"; text: string }[] | null;
  [field: string]: unknown;
}

/** The parts of a prompt in addition to the messages; the names are transformers', in camelCase. */
export interface ChatOptions {
  tools?: readonly unknown[] | null;
  documents?: readonly unknown[] | null;
  /** A Jinja template, or the name of a template of the package. */
  chatTemplate?: string | null;
  /** End with the opening of the assistant's answer. */
  addGenerationPrompt?: boolean;
  /** Further variables of the template, such as enable_thinking. */
  chatTemplateKwargs?: Readonly<Record<string, unknown>>;
}

export const CHAT_OPTIONS = ["tools", "documents", "chatTemplate", "addGenerationPrompt", "chatTemplateKwargs"] as const;

const RANGE = "range_of_qsample";
const LONGEST_RANGE = 100_000; // of Jinja's sandbox, in which the Python runtime renders templates

/** Have a parsed template call `range` below, which is bounded; the library's takes all memory that a template asks for. */
function rename(node: any): void {
  if (typeof node !== "object" || node === null) return;
  if (node.type === "Identifier" && node.value === "range") node.value = RANGE;
  for (const [key, part] of Object.entries(node)) if (!(node.type === "MemberExpression" && key === "property" && !node.computed)) rename(part);
}

function range(...given: number[]): number[] {
  const [start, stop, step] = given.length > 1 ? [given[0], given[1], given[2] ?? 1] : [0, given[0], 1];
  const count = Math.max(0, Math.ceil((stop - start) / step));
  if (!(count <= LONGEST_RANGE)) throw new Error(`a range of ${count} numbers; ${LONGEST_RANGE} are the most`);
  return Array.from({ length: count }, (_, index) => start + index * step);
}

export function isChat(value: unknown): value is Message[] {
  return Array.isArray(value) && value.length > 0 && value.every((item) => typeof item === "object" && item !== null && !Array.isArray(item));
}

/** A package's chat templates by name, and the special tokens that they spell out. */
export class ChatTemplates {
  private constructor(
    private readonly templates: Readonly<Record<string, string>>,
    private readonly specialTokens: Readonly<Record<string, string>>,
  ) {}

  static async of(files: PackageFiles, config: Record<string, any>): Promise<ChatTemplates> {
    const templates: Record<string, string> = {};
    if (hasFile(files, "chat_template.jinja")) templates.default = (await readText(files, "chat_template.jinja"))!;
    for (const name of Object.keys(files.manifest.files)) {
      const found = /^additional_chat_templates\/([^/]+)\.jinja$/.exec(name);
      if (found) templates[found[1]] = (await readText(files, name))!;
    }
    if (!Object.keys(templates).length) {
      const given = config.chat_template;
      if (typeof given === "string") templates.default = given;
      for (const entry of Array.isArray(given) ? given : []) templates[entry.name] = entry.template;
    }
    const special: Record<string, string> = {};
    for (const [name, value] of Object.entries(config)) {
      const content = typeof value === "object" && value ? value.content : value;
      if (name.endsWith("_token") && typeof content === "string") special[name] = content;
    }
    return new ChatTemplates(templates, special);
  }

  get any(): boolean {
    return Object.keys(this.templates).length > 0;
  }

  /** The text of a conversation, up to the assistant's answer unless the options say otherwise. */
  render(messages: readonly Message[], options: ChatOptions): string {
    checkOptions(options);
    const source = this.source(options);
    const variables = {
      ...this.specialTokens,
      ...options.chatTemplateKwargs,
      tools: options.tools ?? null,
      documents: options.documents ?? null,
      add_generation_prompt: options.addGenerationPrompt ?? true,
    };
    try {
      const template = new Template(source);
      rename(template.parsed);
      return template.render({ ...variables, messages: messages.map(checked), [RANGE]: range });
    } catch (error) {
      if (error instanceof ArgumentError) throw error;
      throw new ArgumentError(`the model's chat template refuses these messages: ${(error as Error).message}`, "messages");
    }
  }

  private source({ chatTemplate, tools }: ChatOptions): string {
    const names = Object.keys(this.templates);
    if (chatTemplate != null) {
      if (!Object.hasOwn(this.templates, chatTemplate) && !chatTemplate.includes("{")) {
        throw new ArgumentError(
          `chatTemplate is ${shown(chatTemplate)}, which is neither Jinja nor a template of the package (it has ` +
            `${names.join(", ") || "none"}); give such a name, or the template's text`, "chatTemplate");
      }
      return Object.hasOwn(this.templates, chatTemplate) ? this.templates[chatTemplate] : chatTemplate;
    }
    const source = (tools && this.templates.tool_use) || this.templates.default;
    if (source) return source;
    throw new ArgumentError(
      names.length
        ? `the package has several chat templates and no default; give chatTemplate a name: ${names.join(", ")}`
        : "the package has no chat template; give chatTemplate, or give plain text", "chatTemplate");
  }
}

function checkOptions(options: ChatOptions): void {
  const wrong = (name: keyof ChatOptions, accepted: string): never => {
    throw new ArgumentError(`${name} is ${shown(options[name])}; give ${accepted}`, name);
  };
  for (const name of ["tools", "documents"] as const) if (options[name] != null && !Array.isArray(options[name])) wrong(name, "a list, or null");
  if (options.chatTemplate != null && typeof options.chatTemplate !== "string") wrong("chatTemplate", "a Jinja template, or the name of a template of the package");
  if (options.addGenerationPrompt != null && typeof options.addGenerationPrompt !== "boolean") wrong("addGenerationPrompt", "true or false");
  const { chatTemplateKwargs: variables } = options;
  if (variables != null && (typeof variables !== "object" || Array.isArray(variables))) wrong("chatTemplateKwargs", "an object of variables");
}

/** A message with its content as text: parts of text are joined by line breaks. */
function checked(message: Message, index: number): Record<string, unknown> {
  if (typeof message.role !== "string") throw new ArgumentError(`chat message ${index} is ${shown(message)}; give {role, content}`, "messages");
  const own = Object.fromEntries(Object.entries(message).filter(([, value]) => value != null));
  const { content } = own;
  if (content === undefined) {
    if (message.role === "assistant" && Object.keys(own).length > 1) return own; // it may have called tools
    throw new ArgumentError(`chat message ${index} (${message.role}) has no content; give a text, or parts of type text`, "messages");
  }
  if (Array.isArray(content)) {
    const wrong = content.find((part) => part?.type !== "text" || typeof part.text !== "string");
    if (wrong !== undefined) {
      throw new ArgumentError(`chat message ${index} has the part ${shown(wrong)}; the model reads text only: {type: "text", text}`, "messages");
    }
    own.content = content.map((part) => part.text).join("\n");
  } else if (typeof content !== "string" && message.role !== "tool") {
    throw new ArgumentError(`the content of chat message ${index} is ${shown(content)}; give a text, or parts of type text`, "messages");
  }
  return own;
}
