// The form of a new run: shows a scale as a power of two, takes the input along to another
// recipe or a sweep. Only its button and Ctrl+Enter start the run.

import { takeAlong } from 'carry_form'
import { power } from 'formats'
import { root } from 'root'

const isScale = (input) => input.name.startsWith('scaler.') && input.name.endsWith('scale')

/** @param {Found} input */
const showPower = (input) => {
  const exponent = Math.log2(Number(input.value))
  const label = input.closest('.field').querySelector('label')
  const note = label.querySelector('.power') ?? label.appendChild(document.createElement('span'))
  note.className = 'power'
  note.innerHTML = Number.isInteger(exponent) ? ` = ${power(exponent)}` : ''
}

for (const input of document.querySelectorAll('[data-run-form] input[type=number]')) {
  if (!isScale(input)) continue
  showPower(input)
  input.addEventListener('input', () => showPower(input))
}

const form = /** @type {Found} */ (document.querySelector('[data-run-form]'))

for (const link of document.querySelectorAll('[data-to-sweep]')) takeAlong(form, link, `${root}/sweeps/new`)
for (const link of document.querySelectorAll('[data-other]')) takeAlong(form, link, `${root}/runs/new`)

// A browser sends an invalid number as an empty value, so it is reported here.
form?.addEventListener('submit', (event) => {
  const bad = [...form.elements].find((input) => input.validity?.badInput)
  if (!bad) return
  event.preventDefault()
  for (let each = bad.closest('details'); each; each = each.parentElement.closest('details')) each.open = true
  bad.closest('.field').hidden = false
  bad.reportValidity()
})
