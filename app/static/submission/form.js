// The form of a new run: shows a scale as a power of two, takes the input along to another
// recipe or a sweep. Only its button and Ctrl+Enter start the run.

import { takeAlong } from 'carry_form'
import { power } from 'formats'
import { root } from 'root'
import { settingsOf } from 'submit_command'

const isScale = (input) => input.name.startsWith('scaler.') && input.name.endsWith('scale')

/** @param {Found} input */
const showPower = (input) => {
  const exponent = Math.log2(Number(input.value))
  const label = input.closest('.field').querySelector('label')
  const note = label.querySelector('.power') ?? label.appendChild(document.createElement('span'))
  note.className = 'power'
  note.innerHTML = Number.isInteger(exponent) ? ` = ${power(exponent)}` : ''
}

for (const input of document.querySelectorAll('[data-run-form] [data-setting=number] input')) {
  if (!isScale(input)) continue
  showPower(input)
  input.addEventListener('input', () => showPower(input))
}

const form = /** @type {Found} */ (document.querySelector('[data-run-form]'))

for (const link of document.querySelectorAll('[data-to-sweep]')) takeAlong(form, link, `${root}/sweeps/new`)
for (const link of document.querySelectorAll('[data-other]')) takeAlong(form, link, `${root}/runs/new`)

// The name of a run that is filled in from another says what was changed, unless the user names it. What it began with
// is sent along, for the form may be shown again.
const { initial } = form?.elements ?? {}
if (initial) {
  const { name, precision } = form.elements
  /** @returns {Record<string, string>} */
  const values = () => ({
    precision: precision.value,
    ...Object.fromEntries(settingsOf(form).map(({ path, text }) => [path, text])),
  })
  initial.value ||= JSON.stringify({ name: name.value, ...values() })
  const { name: first, ...before } = JSON.parse(initial.value)
  const nameOf = () => {
    const changed = Object.entries(values())
      .filter(([path, text]) => path in before && text !== before[path])
      .map(([path, text]) => (path === 'precision' ? text : `${path.split('.').at(-1)}=${text}`))
    return [first, ...changed].filter(Boolean).join(', ').slice(0, 200)
  }
  let named = nameOf()
  form.addEventListener('input', ({ target }) => {
    if (target !== name && name.value === named) named = name.value = nameOf()
  })
}

const LISTED = 5 // as in forms.py

/** Mark what differs from the recipe's defaults, and say in each closed group what it holds. */
const showSettings = () => {
  const settings = settingsOf(form)
  for (const { field, isChanged } of settings) {
    field.classList.toggle('changed', isChanged)
    field.querySelector('.default').hidden = !isChanged
  }
  for (const summary of form.querySelectorAll('[data-summary]')) {
    const group = summary.closest('details')
    const own = settings.filter(({ field }) => group.contains(field))
    const words = own.filter(({ text }) => text).map(({ field, text }) => withValue(field, text.slice(0, 40)))
    summary.textContent = words.slice(0, LISTED).join(', ') || summary.dataset.summary
    const tag = group.querySelector('[data-changed]')
    const changed = own.filter(({ isChanged }) => isChanged).length
    tag.hidden = !changed
    tag.textContent = `${changed} changed`
  }
  const differing = settings.filter(({ field, isChanged }) => isChanged && field.closest('details')).length
  form.querySelector('[data-differing]').textContent = differing ? `, ${differing} of them changed` : ''
}

/** A setting's title with its value, in the place of "…" if it has one. @param {Found} field @param {string} text */
const withValue = (field, text) => {
  const title = String(field.querySelector('label').firstChild?.textContent).trim()
  const template = title.includes('…') ? title : `${title} …`
  const words = text === '1' ? template.replace(' … steps', ' step').replace('…', text) : template.replace('…', text)
  return /^.[a-z]/.test(words) ? words.charAt(0).toLowerCase() + words.slice(1) : words
}

// The setting that a link leads to.
const linked = document.getElementById(location.hash.slice(1))
linked?.closest('details')?.setAttribute('open', '')
linked?.focus()

if (form) {
  form.addEventListener('input', showSettings)
  // A browser that goes back fills in what was typed: all that follows from it is shown again.
  addEventListener('pageshow', () => form.dispatchEvent(new Event('input', { bubbles: true })))
}
