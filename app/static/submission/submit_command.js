// The command line that submits the same run, kept up to date with the form.

/** A word of a shell command. @param {string} text */
export const quoted = (text) => (/^[\w./:=,+@%-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`)

/**
 * A setting's value as the command reads it: JSON, or the text itself if that is not JSON.
 * @param {string} kind
 * @param {string} text
 */
export const valueOf = (kind, text) => {
  if (kind === 'list')
    return JSON.stringify(
      text
        .split(',')
        .map((part) => part.trim())
        .filter(Boolean),
    )
  if (text === '') return 'null'
  if (kind !== 'text') return text
  try {
    JSON.parse(text)
  } catch {
    return text
  }
  return JSON.stringify(text)
}

/**
 * @param {string} recipe
 * @param {{path: string, kind: string, text: string, isChanged: boolean}[]} settings
 * @param {string[][]} options - each with its value, unless it has none
 */
export const commandOf = (recipe, settings, options) =>
  [
    `halfstep run submit ${quoted(recipe)}`,
    ...options.filter((words) => words.at(-1) !== '').map(([name, ...value]) => [name, ...value.map(quoted)].join(' ')),
    ...settings
      .filter(({ isChanged }) => isChanged)
      .map(({ path, kind, text }) => `--set ${quoted(`${path}=${valueOf(kind, text)}`)}`),
  ].join(' \\\n  ')

/** What the form's settings are, and whether they differ from the recipe's defaults. @param {Found} form */
export const settingsOf = (form) =>
  [...form.querySelectorAll('[data-setting]')].map((field) => {
    const input = field.querySelector('[name]')
    const text = input.type === 'checkbox' ? String(input.checked) : input.value.trim()
    const { setting: kind, default: initial } = field.dataset
    const isSame = text === initial || (kind === 'number' && text && initial && Number(text) === Number(initial))
    return { field, path: input.name, kind, text, isChanged: !isSame }
  })

const form = /** @type {Found} */ (globalThis.document?.querySelector('[data-run-form]'))
const box = /** @type {Found} */ (form?.querySelector('[data-terminal]'))

const show = () => {
  /** @param {string} name */
  const typed = (name) => String(new FormData(/** @type {any} */ (form)).get(name) ?? '').trim()
  /** @param {string} name @param {string} usual */
  const unless = (name, usual) => (typed(name) === usual ? '' : typed(name))
  const options = /** @type {string[][]} */ ([
    ['--precision', typed('precision')],
    ['--name', typed('name')],
    ...typed('tags')
      .split(',')
      .map((tag) => ['--tag', tag.trim()]),
    ['--project', typed('project')],
    ['--nodes', unless('nodes', '1')],
    ['--devices', unless('devices_per_node', '1')],
    [typed('preemptible') && '--preemptible'],
  ])
  box.querySelector('[data-command]').textContent = commandOf(form.dataset.recipe, settingsOf(form), options)
}

// What starts from another run, waits for one or has a priority is not what this command does.
const BEYOND = ['parent_id', 'compared_with', 'after_id']
if (box && !BEYOND.some((name) => form.elements.namedItem(name)?.value)) {
  form.addEventListener('input', show)
  show()
  box.hidden = false
}
