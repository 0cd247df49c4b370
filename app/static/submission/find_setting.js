// Finds settings of a long form by words of their name, title or description; the others wait hidden,
// and are sent all the same.

/** Return whether all words are in a text; true without words. @param {string} sought @param {string} text */
export const isFound = (sought, text) => {
  const lower = text.toLowerCase()
  return sought
    .toLowerCase()
    .split(/\s+/)
    .every((word) => lower.includes(word))
}

/** The main settings stand above the search. @param {Found} group */
const isAlwaysShown = (group) => group.matches('.main-settings')

/** @param {Found} box the search box, with its label and its result @param {Found} form */
const attach = (box, form) => {
  const input = box.querySelector('input')
  const output = box.querySelector('[data-found]')
  const groups = [...form.querySelectorAll('.group')]
  const fields = groups.flatMap((group) =>
    [...group.querySelectorAll('.field')].map((field) => {
      const names = [...field.querySelectorAll('[name]')].map((each) => each.name)
      const words = field.textContent.replace(field.querySelector('.default')?.textContent ?? '', '')
      return { field, group, text: [...names, words].join(' ') }
    }),
  )
  /** State before the search. @type {Map<Found, boolean>|null} */
  let before = null

  const show = () => {
    const sought = input.value.trim()
    before ??= new Map(groups.map((group) => [group, group.open]))
    const found = fields.filter(({ text }) => isFound(sought, text))
    for (const each of fields) each.field.hidden = !isAlwaysShown(each.group) && !found.includes(each)
    for (const group of groups) {
      const hasSome = found.some((each) => each.group === group)
      group.hidden = !isAlwaysShown(group) && !hasSome
      group.open = sought ? hasSome : Boolean(before?.get(group))
    }
    if (!sought) before = null
    output.textContent = sought
      ? found.length
        ? `${found.length} found, the others are hidden`
        : 'No matching setting.'
      : ''
  }

  input.addEventListener('input', show)
  input.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') {
      input.value = ''
      show()
    }
    if (event.key === 'Enter' && !event.ctrlKey && !event.metaKey) {
      event.preventDefault()
      fields
        .find(({ text }) => isFound(input.value.trim(), text))
        ?.field.querySelector('input, select')
        ?.focus()
    }
  })
  box.hidden = false
}

const box = globalThis.document?.querySelector('[data-find]')
if (box) attach(box, box.closest('form'))
